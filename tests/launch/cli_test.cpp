// Flags and exit codes, with a subcommand that only records what it was given.
#include "launch/cli.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "src/base/error.h"

namespace cpattn {
namespace {

enum class Outcome { returns, unsupported, comm, other };

template <Outcome kOutcome>
int act(const RunConfig& config, const CommandLine& line) {
  switch (kOutcome) {
    case Outcome::returns:
      return static_cast<int>(config.heads) + (line.has("loud") ? 100 : 0);
    case Outcome::unsupported:
      throw Unsupported("no such part");
    case Outcome::comm:
      throw CommError("peer is gone");
    case Outcome::other:
      throw 3;
  }
  return -1;
}

const std::vector<Subcommand> kSubcommands{
    {"go",
     "returns heads",
     "cpattn go --heads 9",
     kAllKnobs,
     {{"loud", "", "a switch"}, {"json", "FILE", "a value"}},
     act<Outcome::returns>},
    {"plain", "no knobs", "cpattn plain", kNoKnobs, {}, act<Outcome::returns>},
    {"narrow", "no parity", "cpattn narrow", kProblemKnobs, {}, act<Outcome::returns>},
    {"unsupported", "", "", kNoKnobs, {}, act<Outcome::unsupported>},
    {"comm", "", "", kNoKnobs, {}, act<Outcome::comm>},
    {"other", "", "", kNoKnobs, {}, act<Outcome::other>},
};

struct Result {
  int code = -1;
  std::string out;
  std::string err;
};

Result run(std::vector<std::string> arguments) {
  std::vector<const char*> argv{"cpattn"};
  for (const std::string& argument : arguments) argv.push_back(argument.c_str());
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  Result result;
  result.code = run_command_line(kSubcommands, static_cast<int>(argv.size()), argv.data());
  result.out = testing::internal::GetCapturedStdout();
  result.err = testing::internal::GetCapturedStderr();
  return result;
}

TEST(Cli, GarbageIsAUsageErrorAndNothingRunsBC128) {
  const std::vector<std::vector<std::string>> refused{{"--cp", "abc"},
                                                      {"--cp", "0"},
                                                      {"--cp", "3x"},
                                                      {"--heads", "0"},
                                                      {"--kv-heads", "0"},
                                                      {"--page-size", "0"},
                                                      {"--tol", "nan"},
                                                      {"--tol", "-1"},
                                                      {"--cp", ""},
                                                      {"--cp="},
                                                      {"--cp"},
                                                      {"--cp", "1,,2"},
                                                      {"--cp", "-1"},
                                                      {"--cp", "4097"},
                                                      {"--timeout", "nan"}};
  for (const auto& flags : refused) {
    std::vector<std::string> arguments{"go", "--heads=8"};
    if (flags[0] == "--heads") arguments.pop_back();
    arguments.insert(arguments.end(), flags.begin(), flags.end());

    const Result result = run(arguments);

    EXPECT_EQ(result.code, 2) << flags[0];
    EXPECT_TRUE(result.err.starts_with("cpattn: error: ")) << result.err;
    EXPECT_NE(result.err.find(flags[0].substr(0, flags[0].find('='))), std::string::npos)
        << result.err;
    EXPECT_EQ(result.out, "");
  }
}

TEST(Cli, ValuesMayFollowOrBeJoinedAndMayBeNegative) {
  EXPECT_EQ(run({"go", "--heads", "16"}).code, 16);
  EXPECT_EQ(run({"go", "--heads=16", "--loud"}).code, 116);
  EXPECT_EQ(run({"go", "--softmax-scale", "-0.5"}).code, 8);
}

TEST(Cli, RepeatedAbbreviatedAndStrayArgumentsAreRefused) {
  EXPECT_EQ(run({"go", "--heads=8", "--heads=8"}).err, "cpattn: error: --heads: given twice\n");
  EXPECT_EQ(run({"go", "--heads="}).err, "cpattn: error: --heads: expected a value after =\n");
  EXPECT_EQ(run({"go", "--head=8"}).err,
            "cpattn: error: --head: unknown option, did you mean '--heads'?\n");
  EXPECT_EQ(run({"go", "--chunk_tokens=8"}).err,
            "cpattn: error: --chunk_tokens: unknown option, did you mean '--chunk-tokens'?\n");
  EXPECT_EQ(run({"go", "stray"}).err,
            "cpattn: error: unexpected argument 'stray' (options begin with --)\n");
  EXPECT_EQ(run({"go", "--json", ""}).err, "cpattn: error: --json: expected FILE, got ''\n");
  EXPECT_EQ(run({"go", "--loud=1"}).code, 2);
  EXPECT_EQ(run({"narrow", "--inject=x"}).err,
            "cpattn: error: --inject: not an option of narrow\n");
  EXPECT_EQ(run({"plain", "--heads=8"}).code, 2);
}

TEST(Cli, BooleansAreSwitchesThatMayBeSpelledOut) {
  EXPECT_NE(run({"go", "--verify-checksum", "--print-config"}).out.find("verify_checksum: true"),
            std::string::npos);
  EXPECT_NE(
      run({"go", "--verify-checksum=false", "--print-config"}).out.find("verify_checksum: false"),
      std::string::npos);
  EXPECT_EQ(run({"go", "--verify-checksum=off"}).code, 2);
}

TEST(Cli, ExceptionsBecomeExitCodesInOnePlace) {
  EXPECT_EQ(run({"unsupported"}).code, 3);
  EXPECT_EQ(run({"unsupported"}).err, "cpattn: error: no such part\n");
  EXPECT_EQ(run({"comm"}).code, 4);
  EXPECT_EQ(run({"other"}).code, 4);
  EXPECT_EQ(run({"og"}).code, 2);
  EXPECT_EQ(run({}).code, 2);
  EXPECT_EQ(run({"--help"}).code, 0);
  EXPECT_EQ(run({"--version"}).code, 0);
  EXPECT_EQ(run({"--version", "x"}).code, 2);
}

TEST(Cli, EveryHelpHasAnExampleAndEveryFlag) {
  const Result result = run({"go", "--help"});

  EXPECT_EQ(result.code, 0);
  EXPECT_NE(result.out.find("Example:\n  cpattn go --heads 9\n"), std::string::npos);
  for (const char* flag : {"--config", "--print-config", "--chunk-tokens", "--inject", "--loud"}) {
    EXPECT_NE(result.out.find(flag), std::string::npos) << flag;
  }
}

TEST(Cli, FilesAreOverlaidByFlags) {
  const char* file = "configs/parity/full_gqa_f16.yaml";

  EXPECT_EQ(run({"go", "--config", file}).code, 8);
  EXPECT_EQ(run({"go", "--config", file, "--heads", "12"}).code, 12);
  EXPECT_EQ(run({"go", "--config", "none.yaml"}).err, "cpattn: error: none.yaml: no such file\n");
}

TEST(Cli, FlagsOfAConfigurationGiveTheSameConfiguration) {
  CommandLine first;
  first.arguments = {"--cp=1,3",          "--cu-seqlens=0,7,9", "--softmax-scale=-1e-3",
                     "--verify-checksum", "--timeout=0.1",      "--report=a b.json"};
  const RunConfig config = parse_arguments(kSubcommands[0], first);

  CommandLine second;
  second.arguments = to_flags(config);
  const RunConfig same = parse_arguments(kSubcommands[0], second);

  EXPECT_EQ(to_flags(same), second.arguments);
  EXPECT_EQ(same.cu_seqlens, config.cu_seqlens);
  EXPECT_EQ(same.report, config.report);
  EXPECT_TRUE(to_flags(RunConfig{}).empty());
}

}  // namespace
}  // namespace cpattn
