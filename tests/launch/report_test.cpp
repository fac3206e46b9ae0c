#include "launch/report.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

namespace cpattn {
namespace {

LaneReport lane(int cp, LaneStatus status, FailureKind failure = FailureKind::none) {
  LaneReport report;
  report.source = "synthetic/normal";
  report.cp = cp;
  report.status = status;
  report.failure = failure;
  for (const char* name : {"out", "dk"}) {
    TensorReport tensor;
    tensor.name = name;
    tensor.compared_elements = 1000;
    tensor.reference_rows = 10;
    tensor.total_rows = 10;
    tensor.bound = 1e-6;
    report.tensors.push_back(tensor);
  }
  report.guarantee = "bitwise across CP sizes";
  report.isa = "cpu/generic";
  report.ranks.push_back({.rank = 0, .host = "here", .pid = 7, .rows = 10, .seconds = 0.5});
  if (status != LaneStatus::passed) report.reasons = {"out: <NaN> & \"more\""};
  return report;
}

ParityReport report_of(std::vector<LaneReport> lanes) {
  ParityReport report;
  report.lanes = std::move(lanes);
  report.chunk_tokens = 512;
  return report;
}

std::string last_line(const std::string& text) {
  const std::size_t end = text.find_last_not_of('\n');
  return text.substr(text.rfind('\n', end) + 1, end - text.rfind('\n', end));
}

TEST(ParityReport, PassesOnlyWhenEverythingWasEvaluatedAndPassed) {
  const LaneReport good = lane(1, LaneStatus::passed);

  EXPECT_EQ(report_of({good}).exit_code(), ExitCode::pass);
  EXPECT_EQ(report_of({good, lane(2, LaneStatus::failed, FailureKind::differs)}).exit_code(),
            ExitCode::differs);
  EXPECT_EQ(report_of({good, lane(2, LaneStatus::failed, FailureKind::internal)}).exit_code(),
            ExitCode::internal);
  EXPECT_EQ(
      report_of({good, lane(2, LaneStatus::not_evaluated, FailureKind::unavailable)}).exit_code(),
      ExitCode::unavailable);
  EXPECT_NE(report_of({good, lane(2, LaneStatus::failed)}).exit_code(), ExitCode::pass);
}

TEST(ParityReport, WrongNumbersOutrankWhatDidNotRun) {
  const ParityReport report = report_of({lane(1, LaneStatus::failed, FailureKind::differs),
                                         lane(2, LaneStatus::failed, FailureKind::internal)});

  EXPECT_EQ(report.exit_code(), ExitCode::differs);
}

TEST(BC_101, NothingEvaluatedIsNotAPass) {
  const ParityReport nothing = report_of({});
  const ParityReport only_skipped = report_of({lane(2, LaneStatus::not_evaluated)});

  EXPECT_FALSE(nothing.passes());
  EXPECT_NE(nothing.exit_code(), ExitCode::pass);
  EXPECT_FALSE(only_skipped.passes());
  EXPECT_NE(report_text(only_skipped).find("not evaluated"), std::string::npos);
}

TEST(BC_097, OneFailureAmongTenIsCounted) {
  std::vector<LaneReport> lanes(9, lane(1, LaneStatus::passed));
  lanes.push_back(lane(2, LaneStatus::failed, FailureKind::differs));
  const ParityReport report = report_of(std::move(lanes));

  EXPECT_NE(report.exit_code(), ExitCode::pass);
  EXPECT_TRUE(last_line(report_text(report))
                  .starts_with("verdict: FAIL: 9 passed, 1 failed, 0 not evaluated"));
}

TEST(ReportText, EndsWithTheVerdictAndWhatItRestsOn) {
  const std::string line = last_line(report_text(report_of({lane(1, LaneStatus::passed)})));

  EXPECT_EQ(line,
            "verdict: PASS: 1 passed, 0 failed, 0 not evaluated; guarantee: bitwise across CP "
            "sizes; chunk_tokens 512; isa cpu/generic");
}

TEST(ReportText, NamesTheWorstTensorOfALane) {
  LaneReport report = lane(2, LaneStatus::passed);
  report.tensors[0].worst_rel_l2 = 4e-7;
  report.tensors[1].worst_rel_l2 = 5e-7;
  report.tensors[1].worst_head = 3;
  report.tensors[1].worst_chunk = 17;

  const std::string text = report_text(report_of({report}));

  EXPECT_NE(text.find("dk  5.00e-07 3/17  1.00e-06"), std::string::npos) << text;
  EXPECT_NE(text.find("  f32   out 4.0e-07/1.0e-06  dk 5.0e-07/1.0e-06\n"), std::string::npos)
      << text;
  report.tensors[0].passes = false;
  EXPECT_EQ(report.worst()->name, "out");
}

TEST(ReportText, SaysHowManyReferenceRowsWereComputed) {
  LaneReport sampled = lane(1, LaneStatus::passed);
  sampled.tensors[0].total_rows = 3990;

  EXPECT_NE(report_text(report_of({sampled})).find("20 of 4000 rows"), std::string::npos);
}

TEST(ReportJson, HoldsEveryLaneAndNoBareInfinity) {
  LaneReport bad = lane(2, LaneStatus::failed, FailureKind::differs);
  bad.tensors[1].rel_l2 = std::numeric_limits<double>::infinity();
  bad.tensors[1].worst_rel_l2 = std::numeric_limits<double>::infinity();
  bad.tensors[1].max_abs = 0.1;
  bad.tensors[1].bit_mismatch = 3;
  bad.tensors[1].passes = false;

  const auto json =
      nlohmann::json::parse(report_json(report_of({lane(1, LaneStatus::passed), bad})));

  EXPECT_EQ(json["schema_version"], "2");
  EXPECT_EQ(json["verdict"], "FAIL");
  ASSERT_EQ(json["lanes"].size(), 2u);
  for (const char* key :
       {"cp", "sharding", "mask", "dtype", "schedule", "compared_elements", "bit_mismatch",
        "rel_l2", "pass", "source", "ranks", "reasons", "direction", "tensors"}) {
    EXPECT_TRUE(json["lanes"][0].contains(key)) << key;
  }
  EXPECT_EQ(json["lanes"][0]["pass"], true);
  EXPECT_EQ(json["lanes"][1]["pass"], false);
  EXPECT_EQ(json["lanes"][1]["rel_l2"], "inf");
  EXPECT_EQ(json["lanes"][1]["worst_tensor"], "dk");
  EXPECT_EQ(json["lanes"][1]["compared_elements"], 2000);
  EXPECT_EQ(json["lanes"][1]["direction"], "both");
  const auto& tensor = json["lanes"][1]["tensors"][1];
  for (const char* key : {"name", "compared_elements", "bit_mismatch", "rel_l2", "worst_rel_l2",
                          "bound", "pass", "max_abs", "worst_head", "worst_chunk"}) {
    EXPECT_TRUE(tensor.contains(key)) << key;
  }
  EXPECT_EQ(tensor["max_abs"].get<double>(), 0.1);  // the double comes back as it was
  EXPECT_EQ(tensor["rel_l2"], "inf");
  EXPECT_EQ(tensor["pass"], false);
  EXPECT_EQ(json["lanes"][1]["bit_mismatch"], 3);
  EXPECT_EQ(json["lanes"][0]["ranks"][0]["host"], "here");
}

TEST(ReportJson, ShowsNamesThatAreNotUtf8) {
  LaneReport odd = lane(1, LaneStatus::passed);
  odd.source = "file\xff.safetensors";

  EXPECT_NO_THROW(nlohmann::json::parse(report_json(report_of({odd}))));
}

TEST(ReportJunit, EscapesAndCounts) {
  const ParityReport report =
      report_of({lane(1, LaneStatus::passed), lane(2, LaneStatus::failed, FailureKind::differs),
                 lane(4, LaneStatus::not_evaluated)});

  const std::string xml = report_junit(report);

  EXPECT_NE(xml.find("tests=\"3\" failures=\"1\" errors=\"1\" skipped=\"0\""), std::string::npos);
  EXPECT_NE(xml.find("out: &lt;NaN&gt; &amp; &quot;more&quot;"), std::string::npos);
  EXPECT_EQ(xml.find("<NaN>"), std::string::npos);
}

TEST(ReportJunit, HoldsOnlyCharactersOfXml) {
  LaneReport odd = lane(1, LaneStatus::passed);
  // Not UTF-8, overlong, a surrogate, cut short, no character; then what stays as it is.
  odd.source =
      "\xff|\xc0\xaf|\xed\xa0\x80|\xef\xbf\xbf|\x07|\xc3\xa9|\xe2\x82\xac|\xf0\x9f\x98\x80|"
      "\xe2\x82";

  const std::string xml = report_junit(report_of({odd}));

  EXPECT_NE(xml.find(" ?|??|???|???|?|\xc3\xa9|\xe2\x82\xac|\xf0\x9f\x98\x80|??\""),
            std::string::npos)
      << xml;
}

}  // namespace
}  // namespace cpattn
