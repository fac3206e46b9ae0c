// The machine-readable forms of a ParityReport: JSON and JUnit XML.
#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>

#include "launch/report.h"

namespace cpattn {
namespace {

using Json = nlohmann::ordered_json;

/// JSON has no infinities; a writer that emits them is not read by anyone.
Json number(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  return value;
}

Json json_of(const RankReceipt& rank) {
  return {{"rank", rank.rank},
          {"host", rank.host},
          {"pid", rank.pid},
          {"rows", rank.rows},
          {"bytes_sent", rank.bytes_sent},
          {"messages", rank.messages},
          {"seconds", number(rank.seconds)},
          {"backward_seconds", number(rank.backward_seconds)},
          {"compute_seconds", number(rank.compute_seconds())},
          {"exposed_seconds", number(rank.exposed_seconds)},
          {"peak_rss", rank.peak_rss_bytes}};
}

Json json_of(const TensorReport& tensor) {
  return {{"name", tensor.name},
          {"pass", tensor.passes},
          {"compared_elements", tensor.compared_elements},
          {"bit_mismatch", tensor.bit_mismatch},
          {"first_difference", tensor.first_difference},
          {"reference_rows", tensor.reference_rows},
          {"total_rows", tensor.total_rows},
          {"rel_l2", number(tensor.rel_l2)},
          {"worst_rel_l2", number(tensor.worst_rel_l2)},
          {"bound", number(tensor.bound)},
          {"max_abs", number(tensor.max_abs)},
          {"worst_head", tensor.worst_head},
          {"worst_chunk", tensor.worst_chunk}};
}

Json json_of(const LaneReport& lane) {
  const TensorReport* const worst = lane.worst();
  Json json{{"source", lane.source},
            {"cp", lane.cp},
            {"baseline", lane.is_baseline},
            {"sharding", name_of(lane.sharding)},
            {"mask", name_of(lane.mask)},
            {"dtype", name_of(lane.dtype)},
            {"schedule", name_of(lane.schedule)},
            {"pass", lane.status == LaneStatus::passed},
            {"status", name_of_status(lane.status)},
            {"reasons", lane.reasons},
            {"notes", lane.notes},
            {"direction", name_of(lane.direction)},
            {"compared_elements", lane.compared_elements()},
            {"bit_mismatch", lane.bit_mismatch()},
            {"bits_must_match", lane.bits_must_match},
            {"rel_l2", number(worst == nullptr ? 0.0 : worst->rel_l2)},
            {"worst_tensor", worst == nullptr ? "" : worst->name},
            {"tensors", Json::array()},
            {"seconds", number(lane.seconds())},
            {"exposed_seconds", number(lane.exposed_seconds())},
            {"transport", lane.transport},
            {"guarantee", lane.guarantee},
            {"isa", lane.isa},
            {"threads", lane.threads},
            {"ranks", Json::array()}};
  for (const TensorReport& tensor : lane.tensors) json["tensors"].push_back(json_of(tensor));
  for (const RankReceipt& rank : lane.ranks) json["ranks"].push_back(json_of(rank));
  return json;
}

Json json_of(const std::vector<std::pair<std::string, std::string>>& entries) {
  Json json = Json::object();
  for (const auto& [key, value] : entries) json[key] = value;
  return json;
}

/// Bytes of the character that `text` begins with; 0 when it is not UTF-8 or none that XML 1.0 can
/// hold.
std::size_t xml_character_bytes(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  if (byte(0) < 0x80) {
    const bool is_space = byte(0) == '\t' || byte(0) == '\n' || byte(0) == '\r';
    return byte(0) >= 0x20 || is_space ? 1 : 0;
  }
  const std::size_t bytes = byte(0) < 0xe0 ? 2 : byte(0) < 0xf0 ? 3 : 4;
  if (byte(0) < 0xc2 || byte(0) > 0xf4 || text.size() < bytes) return 0;
  std::uint32_t code = byte(0) & (0x7fU >> bytes);
  for (std::size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
    code = code << 6 | (byte(i) & 0x3fU);
  }
  const bool is_overlong = code < (bytes == 3 ? 0x800U : bytes == 4 ? 0x10000U : 0x80U);
  const bool is_surrogate = code >= 0xd800 && code < 0xe000;
  const bool is_refused = code == 0xfffe || code == 0xffff || code > 0x10ffff;
  return is_overlong || is_surrogate || is_refused ? 0 : bytes;
}

/// Text as XML character data and attribute value; what XML 1.0 cannot hold becomes '?'.
std::string xml(std::string_view text) {
  std::string escaped;
  while (!text.empty()) {
    const std::size_t bytes = xml_character_bytes(text);
    const std::string_view character = text.substr(0, bytes);
    const char c = bytes == 0 ? '?' : character.front();
    text.remove_prefix(std::max<std::size_t>(bytes, 1));
    switch (c) {
      case '&':
        escaped += "&amp;";
        break;
      case '<':
        escaped += "&lt;";
        break;
      case '>':
        escaped += "&gt;";
        break;
      case '"':
        escaped += "&quot;";
        break;
      case '\'':
        escaped += "&apos;";
        break;
      case '\n':
      case '\t':
      case '\r':
        escaped += fmt::format("&#{};", static_cast<int>(c));
        break;
      default:
        escaped += bytes == 0 ? "?" : character;
    }
  }
  return escaped;
}

std::string joined(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) text += (text.empty() ? "" : "\n") + line;
  return text;
}

std::string junit_outcome(const char* element, const std::string& reasons) {
  return fmt::format("      <{0} message=\"{1}\">{1}</{0}>\n", element, xml(reasons));
}

std::string junit_case(const LaneReport& lane) {
  std::string text =
      fmt::format("    <testcase classname=\"cpattn.parity\" name=\"{}\" time=\"{:.6f}\"",
                  xml(lane_name(lane)), lane.seconds());
  if (lane.status == LaneStatus::passed) return text + "/>\n";
  const bool is_failure = lane.status == LaneStatus::failed;
  return text + ">\n" + junit_outcome(is_failure ? "failure" : "error", joined(lane.reasons)) +
         "    </testcase>\n";
}

}  // namespace

std::string report_json(const ParityReport& report) {
  Json json{{"schema_version", "2"},
            {"verdict", report.passes() ? "PASS" : "FAIL"},
            {"exit_code", static_cast<int>(report.exit_code())},
            {"passed", report.count(LaneStatus::passed)},
            {"failed", report.count(LaneStatus::failed)},
            {"not_evaluated", report.count(LaneStatus::not_evaluated)},
            {"reasons", report.reasons},
            {"inject", report.inject},
            {"chunk_tokens", report.chunk_tokens},
            {"lanes", Json::array()},
            {"environment", json_of(report.environment)},
            {"config", json_of(report.config)}};
  for (const LaneReport& lane : report.lanes) json["lanes"].push_back(json_of(lane));
  // Names of files and layers may hold bytes that are not UTF-8; they are shown, not refused.
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::string report_junit(const ParityReport& report) {
  const bool has_run_failure = !report.reasons.empty() || report.lanes.empty();
  const std::int64_t failures = report.count(LaneStatus::failed) + (has_run_failure ? 1 : 0);
  const std::string counts = fmt::format("tests=\"{}\" failures=\"{}\" errors=\"{}\" skipped=\"0\"",
                                         report.lanes.size() + (has_run_failure ? 1 : 0), failures,
                                         report.count(LaneStatus::not_evaluated));
  std::string text = "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n";
  text += fmt::format("<testsuites {0}>\n  <testsuite name=\"cpattn parity\" {0}>\n", counts);
  for (const LaneReport& lane : report.lanes) text += junit_case(lane);
  if (has_run_failure) {
    const std::string reasons =
        report.reasons.empty() ? "no lane was evaluated" : joined(report.reasons);
    text += "    <testcase classname=\"cpattn.parity\" name=\"run\">\n" +
            junit_outcome("failure", reasons) + "    </testcase>\n";
  }
  return text + "  </testsuite>\n</testsuites>\n";
}

}  // namespace cpattn
