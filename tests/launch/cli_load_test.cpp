// How settings are overlaid and checked together.
#include "launch/cli_load.h"

#include <gtest/gtest.h>

#include <map>
#include <string>

#include "launch/cli_values.h"

namespace cpattn {
namespace {

Setting flag(const std::string& key, const std::string& value) {
  return {key, flag_of(key), true, split_list(value)};
}
Setting flag_scalar(const std::string& key, const std::string& value) {
  return {key, flag_of(key), false, {{value, false}}};
}

std::string refusal(const std::vector<Setting>& flags) {
  GivenKnobs given;
  try {
    load_config({}, flags, given);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "accepted";
}

TEST(CliLoad, FlagsWinOverTheFileAndTheFileOverDefaults) {
  GivenKnobs given;
  const auto file = read_yaml("heads: 4\nkv_heads: 2\n", "x.yaml");

  const RunConfig config = load_config(file, std::vector{flag_scalar("heads", "6")}, given);

  EXPECT_EQ(config.heads, 6);
  EXPECT_EQ(config.kv_heads, 2);
  EXPECT_EQ(config.head_dim, RunConfig{}.head_dim);
  EXPECT_EQ(given, (GivenKnobs{{"heads", "--heads"}, {"kv_heads", "x.yaml:2: kv_heads"}}));
}

TEST(CliLoad, HeadsThatDoNotDivideAreNamed) {
  const std::string message = refusal({flag_scalar("heads", "6"), flag_scalar("kv_heads", "4")});

  EXPECT_EQ(message, "--kv-heads: heads is 6, expected a multiple of kv_heads = 4");
}

TEST(CliLoad, LengthsThatDoNotFitAreRefused) {
  EXPECT_EQ(refusal({flag("cu_seqlens", "0,5,3")}),
            "--cu-seqlens: cu_seqlens_q[2] is 3, expected at least cu_seqlens_q[1] = 5");
  EXPECT_NE(refusal({flag("cu_seqlens", "1,5")}), "accepted");
  EXPECT_NE(refusal({flag("cu_seqlens", "0,5"), flag("cu_seqlens_kv", "0,5,6")}), "accepted");
  EXPECT_EQ(refusal({flag("cu_seqlens", "0,5,5"), flag("cu_seqlens_kv", "0,0,6")}), "accepted");
}

TEST(CliLoad, AbsurdNumbersOfChunksAreRefusedBeforeMemoryIs) {
  EXPECT_EQ(refusal({flag_scalar("seq_len", "1099511627776"), flag_scalar("chunk_tokens", "8")}),
            "chunk_tokens 8: cuts the tokens into 137438953472 chunks, expected at most 16777216");
}

TEST(CliLoad, KnobsWithoutEffectAreRefusedNotIgnored) {
  EXPECT_EQ(refusal({flag_scalar("tensors", "a.safetensors"), flag_scalar("heads", "8")}),
            "--heads: has no effect: the file that tensors names decides");
  EXPECT_EQ(refusal({flag_scalar("layer", "layer.0")}),
            "--layer: has no effect: it picks from a file, and there is no tensors");
  EXPECT_EQ(refusal({flag("cu_seqlens", "0,5"), flag_scalar("seq_len", "5")}),
            "--seq-len: has no effect: cu_seqlens decides the lengths");
  EXPECT_EQ(refusal({flag("cu_seqlens_kv", "0,5")}),
            "--cu-seqlens-kv: has no effect: it goes with cu_seqlens, which is not given");
}

TEST(CliLoad, ZeroKeysAreAValue) {
  GivenKnobs given;

  EXPECT_EQ(load_config({}, std::vector{flag_scalar("kv_len", "0")}, given).kv_len, 0);
  EXPECT_EQ(RunConfig{}.kv_len, -1);
}

TEST(CliLoad, AgreementHoldsTheKnobsThatMustBeEqualAndNoOther) {
  RunConfig config;
  const std::string before = agreement_lines(config);

  config.report = "elsewhere.json";
  config.cp_config.threads = 3;
  EXPECT_EQ(agreement_lines(config), before);
  config.seed = 2;
  EXPECT_NE(agreement_lines(config), before);
  EXPECT_NE(before.find("chunk_tokens=512\n"), std::string::npos);
}

TEST(CliLoad, EveryKnobIsDeclaredOnce) {
  std::map<std::string, int> count;
  for (const std::string& name : knob_names()) ++count[name];

  for (const auto& [name, times] : count) EXPECT_EQ(times, 1) << name;
  EXPECT_GE(count.size(), 25u);
}

}  // namespace
}  // namespace cpattn
