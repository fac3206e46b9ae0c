// Conclusions, on made-up machines.
#include "launch/doctor.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

namespace cpattn {
namespace {

MachineFacts good_machine() {
  MachineFacts facts;
  facts.is_built_with_mpi = true;
  facts.is_built_with_openmp = true;
  facts.kernels = {"cpu/generic", "cpu/avx2"};
  facts.mpirun_version = "mpirun (Open MPI) 4.1.4";
  facts.usable_cores = 2;
  facts.online_cores = 2;
  facts.memory_total = std::uint64_t{24} << 30;
  facts.memory_available = std::uint64_t{20} << 30;
  facts.shared_memory_free = std::uint64_t{1} << 30;
  return facts;
}

const Finding& finding_of(const Diagnosis& diagnosis, const std::string& part) {
  for (const Finding& finding : diagnosis.findings) {
    if (finding.part == part) return finding;
  }
  throw std::out_of_range(part);
}

TEST(Doctor, AMachineWithEverythingNeededRunsParity) {
  const Diagnosis diagnosis = diagnose(good_machine());

  EXPECT_TRUE(diagnosis.can_run_parity);
  for (const Finding& finding : diagnosis.findings) {
    EXPECT_TRUE(finding.kind == FindingKind::ok || finding.kind == FindingKind::unused)
        << finding.part;
  }
}

TEST(Doctor, WithoutMpiParityCannotRunAndTheRemedyIsNamed) {
  MachineFacts no_mpirun = good_machine();
  no_mpirun.mpirun_version = "";
  MachineFacts another_mpi = good_machine();
  another_mpi.mpirun_version = "HYDRA build details:";
  MachineFacts not_built = good_machine();
  not_built.is_built_with_mpi = false;

  for (const MachineFacts& facts : {no_mpirun, another_mpi, not_built}) {
    const Diagnosis diagnosis = diagnose(facts);

    EXPECT_FALSE(diagnosis.can_run_parity);
    EXPECT_EQ(finding_of(diagnosis, "Open MPI").kind, FindingKind::missing);
    EXPECT_NE(finding_of(diagnosis, "Open MPI").remedy.find("apt-get install openmpi-bin"),
              std::string::npos);
  }
}

TEST(Doctor, EverythingThatIsNotThereHasARemedy) {
  MachineFacts facts = good_machine();
  facts.usable_cores = 1;
  facts.single_copy_error = "Operation not permitted";
  facts.is_built_with_openmp = false;
  facts.shared_memory_free = 0;
  facts.core_quota = 0.5;

  const Diagnosis diagnosis = diagnose(facts);

  EXPECT_TRUE(diagnosis.can_run_parity);
  for (const char* part : {"cores", "single copy", "threads", "shared memory"}) {
    EXPECT_EQ(finding_of(diagnosis, part).kind, FindingKind::limited) << part;
    EXPECT_NE(finding_of(diagnosis, part).remedy, "") << part;
  }
  for (const char* part : {"CUDA toolkit", "CUDA driver", "GPU", "NCCL", "CUDA-aware MPI"}) {
    EXPECT_EQ(finding_of(diagnosis, part).kind, FindingKind::unused) << part;
    EXPECT_NE(finding_of(diagnosis, part).remedy, "") << part;
  }
}

TEST(Doctor, GpusAreNeverClaimedToWork) {
  MachineFacts facts = good_machine();
  facts.cuda_toolkit = "release 13.0";
  facts.has_cuda_driver = true;
  facts.gpus = {"GPU 0: H200"};
  facts.has_nccl = true;
  facts.is_mpi_cuda_aware = true;

  const Diagnosis diagnosis = diagnose(facts);

  EXPECT_FALSE(diagnosis.abilities.back().works);
  EXPECT_NE(diagnosis.abilities.back().why.find("uses CUDA"), std::string::npos);
}

TEST(Doctor, JsonHoldsWhatTheTextHolds) {
  const Diagnosis diagnosis = diagnose(good_machine());

  const auto json = nlohmann::json::parse(to_json(diagnosis));
  const std::string text = to_text(diagnosis);

  EXPECT_EQ(json["can_run_parity"], true);
  ASSERT_EQ(json["findings"].size(), diagnosis.findings.size());
  for (const auto& finding : json["findings"]) {
    EXPECT_NE(text.find(finding["found"].get<std::string>()), std::string::npos);
  }
}

}  // namespace
}  // namespace cpattn
