// Files are refused with file, line and key, and what is printed reads back.
#include "launch/cli_yaml.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "launch/cli_load.h"

namespace cpattn {
namespace {

RunConfig load(const std::string& text) {
  GivenKnobs given;
  return load_config(read_yaml(text, "x.yaml"), {}, given);
}

std::string refusal(const std::string& text) {
  try {
    load(text);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "accepted";
}

TEST(CliYaml, ReadsScalarsFlowListsAndBlockLists) {
  const RunConfig config = load(
      "# a comment\n"
      "cp: [1, 3]\n"
      "mask:\n  - full\n  - causal\n"
      "dtype: bf16\n"
      "timeout: 2.5\n"
      "verify_checksum: true\n"
      "softmax_scale: -0.25\n"
      "report: \"a b.json\"\n");

  EXPECT_EQ(config.cp, (std::vector<std::int64_t>{1, 3}));
  EXPECT_EQ(config.mask, (std::vector<MaskKind>{MaskKind::full, MaskKind::causal}));
  EXPECT_EQ(config.dtype, std::vector<DType>{DType::bf16});
  EXPECT_EQ(config.cp_config.timeout_seconds, 2.5);
  EXPECT_TRUE(config.cp_config.verify_checksum);
  EXPECT_EQ(config.softmax_scale, "-0.25");
  EXPECT_EQ(config.report, "a b.json");
}

TEST(CliYaml, BadIntegersAreRefusedWithFileLineAndKeyBC126) {
  for (const char* text :
       {"0100", "08", "0o20", "1e3", "12.0", "-4", "99999999999999", "true", "off"}) {
    EXPECT_EQ(refusal("heads: 8\nseq_len: " + std::string(text) + "\n"),
              "x.yaml:2: seq_len: expected an integer in [0, 1099511627776], got '" +
                  std::string(text) + "'");
  }
  EXPECT_EQ(refusal("seq_len: ''\n"),
            "x.yaml:1: seq_len: expected an integer in [0, 1099511627776], got quoted text ''");
  EXPECT_EQ(refusal("heads: 8\n\nseq_len:\n"), "x.yaml:3: seq_len: has no value");
  EXPECT_EQ(refusal("seq_len: ~\n"), "x.yaml:1: seq_len: has no value");
}

TEST(CliYaml, UnknownAndRepeatedKeysAreRefused) {
  EXPECT_EQ(refusal("chunk_token: 64\n"),
            "x.yaml:1: chunk_token: unknown key, did you mean 'chunk_tokens'?");
  EXPECT_EQ(refusal("chunk-tokens: 64\n"),
            "x.yaml:1: chunk-tokens: unknown key, did you mean 'chunk_tokens'?");
  EXPECT_EQ(refusal("heads: 8\nseed: 1\nheads: 8\n"),
            "x.yaml:3: heads: appears twice, first at x.yaml:1");
}

TEST(CliYaml, EveryProblemIsReported) {
  EXPECT_EQ(refusal("cp: 0\nmask: half\nfoo: 1\n"),
            "x.yaml:1: cp: expected an integer in [1, 4096], got '0'\n"
            "x.yaml:2: mask: expected full | causal, got 'half'\n"
            "x.yaml:3: foo: unknown key");
}

TEST(CliYaml, OnlyAFlatMappingIsAccepted) {
  EXPECT_EQ(refusal("base: &b 3\n"), "x.yaml:1: base: anchors (&name) are not supported");
  EXPECT_EQ(refusal("heads: 4\nkv_heads: *b\n").substr(0, 9), "x.yaml:2:");
  EXPECT_EQ(refusal("<<: 3\n"), "x.yaml:1: merge keys (<<) are not supported");
  EXPECT_EQ(refusal("heads: !!int 3\n"),
            "x.yaml:1: heads: tags (tag:yaml.org,2002:int) are not supported");
  EXPECT_EQ(refusal("heads: {a: 1}\n"), "x.yaml:1: heads: a mapping as a value is not supported");
  EXPECT_EQ(refusal("cp: [[1], 2]\n"), "x.yaml:1: cp: a list inside a list is not supported");
  EXPECT_EQ(refusal("heads: [8]\n"),
            "x.yaml:1: heads: expected an integer in [1, 4096], got a list");
  EXPECT_EQ(refusal("cp: []\n"),
            "x.yaml:1: cp: expected an integer in [1, 4096], one or more, got an empty list");
  EXPECT_EQ(refusal("cp: [1, ]\n"), "accepted");  // a trailing comma is YAML, not an element
  EXPECT_EQ(refusal("cp: [1, ~]\n"), "x.yaml:1: cp: has no value");
  EXPECT_EQ(refusal("- heads\n"), "x.yaml:1: expected 'key: value' lines, got a list");
  EXPECT_EQ(refusal("heads\n"), "x.yaml:1: expected 'key: value' lines, got 'heads'");
  EXPECT_EQ(refusal("heads: 8\n---\nheads: 9\n"),
            "x.yaml:2: expected one list of 'key: value' lines, got another document or other "
            "indentation");
  EXPECT_TRUE(refusal(" heads: 8\nkv_heads: 2\n").starts_with("x.yaml:2: expected one list of"));
  EXPECT_EQ(refusal(""), "x.yaml: holds no settings");
  EXPECT_EQ(refusal("# nothing\n"), "x.yaml: holds no settings");
}

TEST(CliYaml, BrokenYamlNamesTheLine) {
  EXPECT_EQ(refusal("heads: 8\n\tcp: 1\n").substr(0, 19), "x.yaml:2: not YAML:");
  EXPECT_TRUE(refusal("heads: 8\ncp: [1, 2\n").starts_with("x.yaml:2: "));
  EXPECT_EQ(refusal(std::string("heads: 8\0\n", 10)),
            "x.yaml: expected UTF-8 text without a byte order mark");
}

TEST(CliYaml, TextIsQuotedOnOneLine) {
  for (const char* text : {"report: \"a\n", "report: 'a\n", "report: \"a\nheads: 8\n\"\n",
                           "report: |\n  a\n", "report: >\n  a\n", "report: \"a\\\"\n"}) {
    EXPECT_EQ(refusal(text), "x.yaml:1: report: text must be quoted on one line") << text;
  }
  EXPECT_EQ(load("heads: 4\r\nreport: 'it''s'\r\nkv_heads: 2\r\n").report, "it's");
  EXPECT_EQ(load("report: \"a\\\"b\" # c\n").report, "a\"b");
}

TEST(CliYaml, MissingFileIsNamed) {
  try {
    read_yaml_file("configs/none.yaml");
    FAIL() << "accepted";
  } catch (const InvalidArgument& error) {
    EXPECT_STREQ(error.what(), "configs/none.yaml: no such file");
  }
}

TEST(CliYaml, FileThatCannotBeReachedIsNotCalledMissing) {
  const std::string path(300, 'x');
  try {
    read_yaml_file(path);
    FAIL() << "accepted";
  } catch (const InvalidArgument& error) {
    EXPECT_EQ(error.what(), path + ": File name too long");
  }
}

TEST(CliYaml, PrintedConfigurationReadsBack) {
  RunConfig config;
  config.cp = {1, 4096};
  config.mask = {MaskKind::full, MaskKind::causal};
  config.cp_config.timeout_seconds = 0.1;
  config.cp_config.verify_checksum = true;
  config.cu_seqlens = {0, 5, 5, 9};
  config.softmax_scale = "0";
  config.report = "odd \"name\" \\ # 1.json";

  const std::string text = to_yaml(config);

  EXPECT_EQ(to_yaml(load(text)), text);
  EXPECT_EQ(load(text).report, config.report);
  EXPECT_EQ(load(text).cu_seqlens, config.cu_seqlens);
  EXPECT_EQ(text.find("seq_len:"), std::string::npos) << "cu_seqlens decides the lengths";
  EXPECT_NE(text, to_yaml(RunConfig{}));
}

TEST(CliYaml, EveryCommittedConfigurationLoadsAndSaysWhatItProves) {
  int num_files = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator("configs")) {
    if (!entry.is_regular_file()) continue;
    ++num_files;
    const std::string path = entry.path().string();
    ASSERT_EQ(entry.path().extension(), ".yaml") << path;
    GivenKnobs given;
    std::ifstream file(path);
    std::string first_line;
    std::getline(file, first_line);

    EXPECT_NO_THROW(load_config(read_yaml_file(path), {}, given)) << path;
    EXPECT_TRUE(first_line.starts_with("# Proves ") || first_line.starts_with("# Measures "))
        << path;
  }
  EXPECT_GE(num_files, 5);
}

}  // namespace
}  // namespace cpattn
