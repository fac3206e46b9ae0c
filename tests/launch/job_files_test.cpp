#include "launch/job_files.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "src/base/error.h"

namespace cpattn {
namespace {

TEST(PrivateDirectory, IsOursAloneAndGoesAway) {
  std::string path;
  {
    const PrivateDirectory directory;
    path = directory.path();
    std::ofstream(directory.make_inside("cp2") + "/file") << "text";

    EXPECT_EQ(std::filesystem::status(path).permissions(), std::filesystem::perms::owner_all);
  }

  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST(RankRecords, SilenceIsToldFromAnEnd) {
  const PrivateDirectory directory;
  write_started(directory.path(), 0);
  write_ended(directory.path(), 0, 4, "two lines\nof text");
  write_started(directory.path(), 1);

  const std::vector<RankRecord> records = read_records(directory.path(), 3);

  EXPECT_EQ(records[0].pid, ::getpid());
  EXPECT_TRUE(records[0].has_ended);
  EXPECT_EQ(records[0].exit_code, 4);
  EXPECT_EQ(records[0].message, "two lines\nof text");
  EXPECT_TRUE(records[1].has_started);
  EXPECT_FALSE(records[1].has_ended);
  EXPECT_FALSE(records[2].has_started);
}

TEST(LaneResult, IsNaNUntilDelivered) {
  const LaneResult result = make_lane_result(3, 2, 4, DType::f32);

  for (int i = 0; i < 3 * 2 * 4; ++i) EXPECT_TRUE(std::isnan(result.out.as<float>()[i]));
  for (int i = 0; i < 3 * 2; ++i) EXPECT_TRUE(std::isnan(result.lse.as<float>()[i]));
  for (int i = 0; i < 3; ++i) EXPECT_EQ(result.deliveries.as<unsigned char>()[i], 0);
}

TEST(LaneResult, SurvivesTheFile) {
  const PrivateDirectory directory;
  const std::string path = directory.path() + "/lane0.result";
  LaneResult result = make_lane_result(2, 1, 3, DType::bf16);
  for (int i = 0; i < 6; ++i) result.out.as<bf16>()[i] = to_bf16(static_cast<float>(i) + 0.5f);
  result.lse.as<float>()[0] = -std::numeric_limits<float>::infinity();
  result.lse.as<float>()[1] = 0.1f;
  result.deliveries.as<unsigned char>()[1] = 1;
  result.ranks.push_back(
      {.rank = 3, .host = "h", .pid = 9, .rows = 2, .seconds = 0.25, .fault_sites = 5});
  result.problems = {"a problem"};
  result.guarantee = std::string("bitwise across CP sizes");

  save_result(path, result);
  const auto loaded = load_result(path);

  ASSERT_TRUE(loaded.has_value());
  EXPECT_EQ(std::memcmp(loaded->out.data(), result.out.data(), result.out_bytes()), 0);
  EXPECT_EQ(std::memcmp(loaded->lse.data(), result.lse.data(), result.lse_bytes()), 0);
  EXPECT_EQ(loaded->deliveries.as<unsigned char>()[1], 1);
  EXPECT_EQ(loaded->ranks[0].fault_sites, 5);
  EXPECT_EQ(loaded->ranks[0].seconds, 0.25);
  EXPECT_EQ(loaded->problems, result.problems);
  EXPECT_FALSE(load_result(path + ".other").has_value());
}

TEST(LaneResult, AShortFileIsNotAResult) {
  const PrivateDirectory directory;
  const std::string path = directory.path() + "/lane0.result";
  save_result(path, make_lane_result(2, 1, 3, DType::f32));
  std::filesystem::resize_file(path, std::filesystem::file_size(path) - 1);

  EXPECT_THROW(load_result(path), InternalError);
}

}  // namespace
}  // namespace cpattn
