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

MachineFacts machine_with_gpus() {
  MachineFacts facts = good_machine();
  facts.cuda_backend = "CUDA runtime 13.0, driver 13.0, NCCL 2.28.9";
  facts.gpus = {{.ordinal = 0,
                 .name = "H200",
                 .compute_major = 9,
                 .compute_minor = 0,
                 .multiprocessors = 132,
                 .memory_bytes = std::size_t{141} << 30,
                 .peers = {1},
                 .refusal = ""},
                {.ordinal = 1,
                 .name = "V100",
                 .compute_major = 7,
                 .compute_minor = 0,
                 .multiprocessors = 80,
                 .memory_bytes = std::size_t{32} << 30,
                 .peers = {0},
                 .refusal = "sm_70, expected sm_80 or later"}};
  return facts;
}

TEST(Doctor, EachGpuIsALineAndOldOnesAreSaidToBe) {
  const Diagnosis diagnosis = diagnose(machine_with_gpus());

  EXPECT_TRUE(diagnosis.abilities.back().works);
  const std::string text = to_text(diagnosis);
  EXPECT_NE(text.find("0: H200, sm_90, 132 multiprocessors, 141.0 GiB, reaches the memory of 1"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("sm_70, expected sm_80 or later"), std::string::npos) << text;
}

TEST(Doctor, GpusAreNotClaimedToWorkWhereSomethingIsMissing) {
  MachineFacts no_backend = machine_with_gpus();
  no_backend.cuda_backend = "";
  no_backend.cuda_backend_error = "CUDA backend libcpattn_cuda.so: No such file";
  MachineFacts no_driver = machine_with_gpus();
  no_driver.gpus.clear();
  no_driver.gpu_refusal = "no CUDA driver";
  MachineFacts only_old = machine_with_gpus();
  only_old.gpus.erase(only_old.gpus.begin());
  MachineFacts no_mpi = machine_with_gpus();
  no_mpi.mpirun_version = "";
  const std::pair<MachineFacts, std::string> cases[] = {{no_backend, "no CUDA backend"},
                                                        {no_driver, "no CUDA driver"},
                                                        {only_old, "sm_70"},
                                                        {no_mpi, "MPI"}};
  for (const auto& [facts, why] : cases) {
    const Diagnosis diagnosis = diagnose(facts);
    const Ability &ability = diagnosis.abilities.back(), &plan = *(diagnosis.abilities.end() - 2);
    EXPECT_EQ(plan.works, why != "no CUDA backend") << plan.what << ": " << plan.why;
    EXPECT_FALSE(ability.works) << why;
    EXPECT_NE(ability.why.find(why), std::string::npos) << ability.why;
  }
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
