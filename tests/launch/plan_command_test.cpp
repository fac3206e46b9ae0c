// The plan as it is printed: a golden text and JSON of a small case, and what must hold for any.
#include "launch/plan_command.h"

#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <utility>

#include "launch/plan_json.h"
#include "launch/plan_summary.h"
#include "launch/plan_text.h"
#include "src/base/error.h"

namespace cpattn {
namespace {

std::string printed(const RunConfig& config, const std::map<std::string, std::string>& options) {
  CommandLine line;
  line.options.insert(options.begin(), options.end());
  testing::internal::CaptureStdout();
  try {
    run_plan(config, line);
  } catch (...) {
    testing::internal::GetCapturedStdout();
    throw;
  }
  return testing::internal::GetCapturedStdout();
}

/// Five chunks over three ranks: uneven, and the same on every machine.
RunConfig small_case() {
  RunConfig config;
  config.cp = {3};
  config.cp_config.threads = 1;
  config.cp_config.chunk_tokens = 8;
  config.isa = name_of(available_kernels().front()->isa);
  config.seq_len = 40;
  config.heads = 2;
  config.kv_heads = 1;
  config.head_dim = 16;
  return config;
}

/// Kernels of made-up sizes: the golden plan depends on no machine and on no kernel's scratch area.
KernelTable golden_kernels() {
  KernelTable table = *available_kernels().front();
  table.name = "cpu/golden";
  table.numerics = [](DType) -> std::string_view { return "golden-arithmetic"; };
  table.packed_kv_bytes = [](const KernelProblem& problem, std::int64_t num_keys) {
    const AttentionShape& shape = problem.shape;
    return static_cast<std::size_t>(num_keys * shape.num_kv_heads *
                                    (shape.head_dim + shape.value_dim)) *
           size_of(problem.dtype);
  };
  table.carried_slot_bytes = [](const KernelProblem& problem) {
    return static_cast<std::size_t>(problem.max_chunk_rows * problem.shape.num_heads *
                                    (problem.shape.value_dim + 2)) *
           sizeof(float);
  };
  table.workspace_bytes = [](const KernelProblem&, const StepLimits&) { return std::size_t{4096}; };
  table.gradient.packed_kv_bytes = table.packed_kv_bytes;
  table.gradient.packed_query_bytes = [](const KernelProblem& problem, std::int64_t num_rows) {
    const AttentionShape& shape = problem.shape;
    return static_cast<std::size_t>(num_rows * shape.num_heads *
                                    (shape.head_dim + shape.value_dim + 2)) *
           sizeof(float);
  };
  table.gradient.dq_slot_bytes = [](const KernelProblem& problem) {
    const AttentionShape& shape = problem.shape;
    return static_cast<std::size_t>(problem.max_chunk_rows * shape.num_heads * shape.head_dim) *
           sizeof(float);
  };
  table.gradient.dkv_slot_bytes = [](const KernelProblem& problem, std::int64_t num_keys) {
    const AttentionShape& shape = problem.shape;
    return static_cast<std::size_t>(num_keys * shape.num_kv_heads *
                                    (shape.head_dim + shape.value_dim)) *
           sizeof(float);
  };
  table.gradient.workspace_bytes = [](const KernelProblem&, const GradientLimits&) {
    return std::size_t{8192};
  };
  return table;
}

/// Likewise for a GPU.
KernelTable golden_gpu_kernels() {
  KernelTable table = golden_kernels();
  table.name = "cuda/golden";
  table.device = DeviceKind::cuda;
  table.num_workers = 264;
  table.step_image = [](const ForwardArgs&) { return std::vector<std::byte>(100); };
  table.launch_tiles = [](const KernelProblem&) { return LaunchTiles{"out", 128, 64, 384, 66560}; };
  table.gradient.step_image = [](const BackwardArgs&) { return std::vector<std::byte>(300); };
  table.gradient.launch_tiles = [](const KernelProblem&) {
    return std::vector{LaunchTiles{"dk, dv", 128, 32, 256, 1000},
                       LaunchTiles{"dq", 64, 16, 128, 0}};
  };
  return table;
}

PlanSummary golden_summary(const KernelTable& kernels, std::optional<int> rank) {
  const RunConfig config = small_case();
  const LaneConfig lane = lanes_of(config).front();
  const auto input = std::move(open_inputs(config).front());
  return summarize_plan(problem_of(config, lane, input->info()), cp_config_of(config, lane),
                        kernels, input->info().name, 3, rank);
}

/// Compares by lines, so that a failure shows the first difference and not two whole files.
void expect_golden(const std::string& text, const std::string& name) {
  const std::string actual_path = testing::TempDir() + name;
  const std::string golden_path = "tests/goldens/" + name;
  std::ofstream(actual_path) << text;
  std::ifstream golden(golden_path);
  ASSERT_TRUE(golden.is_open()) << golden_path;
  std::istringstream actual(text);
  std::string expected_line;
  std::string line;
  for (int number = 1;; ++number) {
    const bool has_expected = static_cast<bool>(std::getline(golden, expected_line));
    const bool has_line = static_cast<bool>(std::getline(actual, line));
    ASSERT_EQ(has_line, has_expected) << golden_path << ":" << number << ": one text is longer";
    if (!has_line) return;
    ASSERT_EQ(line, expected_line) << golden_path << ":" << number << "\nif the new plan is right: "
                                   << "cp " << actual_path << " " << golden_path;
  }
}

TEST(PlanCommand, GoldenText) {
  const KernelTable kernels = golden_kernels();

  expect_golden(plan_text(golden_summary(kernels, std::nullopt)), "plan_zigzag_causal_cp3.txt");
}

TEST(PlanCommand, GoldenJson) {
  const KernelTable kernels = golden_kernels();

  // The steps of one rank are enough to fix the form.
  expect_golden(plan_json(std::vector{golden_summary(kernels, 1)}), "plan_zigzag_causal_cp3.json");
}

PlanSummary golden_gpu_summary(const KernelTable& kernels) {
  PlanSummary summary = golden_summary(kernels, 1);
  summary.gpu = {90, 132, "as asked", {"nccl", "for the golden plan"}};
  return summary;
}

TEST(PlanCommand, GoldenTextOfAGpu) {
  const KernelTable kernels = golden_gpu_kernels();

  expect_golden(plan_text(golden_gpu_summary(kernels)), "plan_gpu_cp3.txt");
}

TEST(PlanCommand, GoldenJsonOfAGpu) {
  const KernelTable kernels = golden_gpu_kernels();

  expect_golden(plan_json(std::vector{golden_gpu_summary(kernels)}), "plan_gpu_cp3.json");
}

TEST(PlanCommand, ExchangeIsWhatAGroupOfGpusChooses) {
  int times_asked = 0;
  const auto chosen = [&](GpuExchange wanted, int num_gpus, int world_size, bool is_aware) {
    return planned_exchange(wanted, num_gpus, world_size, [&] {
      ++times_asked;
      return is_aware;
    });
  };

  EXPECT_EQ(chosen(GpuExchange::automatic, 8, 8, true).name, "nccl");
  EXPECT_EQ(chosen(GpuExchange::automatic, 0, 64, true).name, "nccl");
  EXPECT_EQ(chosen(GpuExchange::nccl, 1, 2, true).name, "nccl");
  EXPECT_EQ(times_asked, 0) << "MPI matters to messages only";
  EXPECT_EQ(chosen(GpuExchange::automatic, 1, 2, false).name, "host, staged");
  EXPECT_EQ(chosen(GpuExchange::host, 8, 2, true).name, "host, cuda-aware");
  EXPECT_TRUE(chosen(GpuExchange::host, 8, 2, false).can_verify_checksums);
  EXPECT_FALSE(chosen(GpuExchange::host, 8, 2, true).can_verify_checksums);
  EXPECT_FALSE(chosen(GpuExchange::nccl, 8, 2, false).can_verify_checksums);
}

TEST(PlanCommand, WithoutABackendNothingIsSaidOfAGpu) {
  RunConfig config = small_case();
  config.device = LaneDevice::cuda;
  config.cuda_backend = "/nowhere/backend.so";

  EXPECT_THROW(printed(config, {}), Unsupported);
}

TEST(PlanCommand, PrintsTheSummaryOfEveryLaneAndSize) {
  RunConfig config = small_case();
  config.cp = {1, 3};
  config.mask = {MaskKind::full, MaskKind::causal};

  const std::string text = printed(config, {});

  for (const char* head :
       {"plan     cp 1, full, ", "plan     cp 3, full, ", "plan     cp 1, causal",
        "plan     cp 3, causal", "result   bitwise across CP sizes"}) {
    EXPECT_NE(text.find(head), std::string::npos) << head;
  }
}

TEST(PlanCommand, EveryVisibleChunkPairIsPlannedOnceAndSendsMatchReceives) {
  RunConfig config = small_case();
  config.cp = {1, 2, 3, 4, 7};
  config.mask = {MaskKind::full, MaskKind::causal};
  config.sharding = {ShardingKind::contiguous, ShardingKind::zigzag};

  const auto json = nlohmann::json::parse(printed(config, {{"json", ""}}));

  ASSERT_EQ(json["plans"].size(), 20u);
  for (const auto& plan : json["plans"]) {
    const bool is_causal = plan["mask"] == "causal";
    std::set<std::pair<std::string, std::string>> pairs;
    std::set<std::pair<int, int>> sends;
    std::set<std::pair<int, int>> receives;
    std::int64_t visible_pairs = 0;
    for (const auto& rank : plan["ranks"]) {
      visible_pairs += rank["visible_pairs"].get<std::int64_t>();
      for (const auto& step : rank["steps"]) {
        const int me = rank["rank"];
        if (!step["send_to"].is_null()) sends.insert({me, step["send_to"].get<int>()});
        if (!step["receive_from"].is_null()) {
          receives.insert({step["receive_from"].get<int>(), me});
        }
        for (const auto& program : step["programs"]) {
          for (const auto& op : program["ops"]) {
            if (op["op"] != "block") continue;
            const std::pair<std::string, std::string> pair{program["q"], op["kv"]};
            EXPECT_TRUE(pairs.insert(pair).second) << pair.first << " x " << pair.second;
          }
        }
      }
    }
    EXPECT_EQ(pairs.size(), is_causal ? 15u : 25u);
    EXPECT_EQ(visible_pairs, is_causal ? 40 * 41 / 2 : 40 * 40);
    EXPECT_EQ(sends, receives);
  }
}

TEST(PlanCommand, PiecesThatAreSentAreReceivedAndEveryGradientIsFinishedOnce) {
  RunConfig config = small_case();
  config.cp = {1, 2, 3, 4, 7};
  config.mask = {MaskKind::full, MaskKind::causal};
  config.sharding = {ShardingKind::contiguous, ShardingKind::zigzag};
  config.schedule = {ScheduleKind::canonical, ScheduleKind::arrival};

  const auto json = nlohmann::json::parse(printed(config, {{"json", ""}}));

  ASSERT_EQ(json["plans"].size(), 40u);
  for (const auto& plan : json["plans"]) {
    std::multiset<std::string> sent, received, finished, met;
    for (const auto& rank : plan["ranks"]) {
      std::int64_t pieces = 0;
      for (const auto& step : rank["backward"]["steps"]) {
        for (const auto& chunk : step["finished"]) finished.insert(chunk.get<std::string>());
        for (const auto& chunk : step["chunks"])
          for (const auto& q : chunk["q"])
            met.insert(q.get<std::string>() + " x " + chunk["kv"].get<std::string>());
        if (step["pieces_from"].is_null()) continue;
        const auto transfer = [&](int from, int to, const char* count, const char* bytes) {
          return std::to_string(from) + ">" + std::to_string(to) + " " + step[count].dump() + " " +
                 step[bytes].dump();
        };
        const int me = rank["rank"];
        sent.insert(transfer(me, step["kv_owner"], "pieces_sent", "bytes_sent"));
        received.insert(transfer(step["pieces_from"], me, "pieces_received", "bytes_received"));
        pieces += step["pieces_sent"].get<std::int64_t>();
      }
      EXPECT_EQ(rank["backward"]["pieces_sent"], pieces);
    }
    EXPECT_EQ(sent, received);
    EXPECT_EQ(finished, (std::multiset<std::string>{"c0", "c1", "c2", "c3", "c4"}));
    EXPECT_EQ(met.size(), plan["mask"] == "causal" ? 15u : 25u);
    EXPECT_EQ(std::set(met.begin(), met.end()).size(), met.size());
  }
}

TEST(PlanCommand, LargePlansAreSummarisedUnlessARankIsAsked) {
  RunConfig config = small_case();
  config.seq_len = 4096;

  const std::string summary = printed(config, {});
  const std::string one_rank = printed(config, {{"rank", "2"}});

  EXPECT_NE(summary.find("--rank R prints those of rank R"), std::string::npos);
  EXPECT_EQ(summary.find("step 0"), std::string::npos);
  EXPECT_NE(one_rank.find("\nrank 2\n  step 0: kv of rank 2"), std::string::npos);
  EXPECT_EQ(one_rank.find("\nrank 1\n"), std::string::npos);
}

TEST(PlanCommand, RankIsParsedLikeAnyOtherNumber) {
  for (const char* rank : {"3", "-1", "01", "x", "1.0"}) {
    EXPECT_THROW(printed(small_case(), {{"rank", rank}}), InvalidArgument) << rank;
  }
}

TEST(PlanCommand, PacksNameTheDocument) {
  RunConfig config = small_case();
  config.cu_seqlens = {0, 20, 20, 30};

  const std::string text = printed(config, {});

  EXPECT_NE(text.find("3 documents"), std::string::npos) << text;
  EXPECT_NE(text.find("d2c0"), std::string::npos) << text;
}

TEST(PlanCommand, ArrivalDoesNotClaimEqualBits) {
  RunConfig config = small_case();
  config.schedule = {ScheduleKind::arrival};

  const auto json = nlohmann::json::parse(printed(config, {{"json", ""}}));

  EXPECT_EQ(json["plans"][0]["guarantee"].get<std::string>().find("bitwise across CP sizes"),
            std::string::npos);
}

}  // namespace
}  // namespace cpattn
