// LaneResult and RankReceipt: in memory, as text, as a file.
#include <cstdio>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "launch/job_files.h"
#include "src/base/error.h"

namespace cpattn {
namespace {

using Json = nlohmann::json;

Json json_of(const RankReceipt& receipt) {
  return {{"rank", receipt.rank},
          {"host", receipt.host},
          {"pid", receipt.pid},
          {"rows", receipt.rows},
          {"bytes_sent", receipt.bytes_sent},
          {"messages", receipt.messages},
          {"seconds", receipt.seconds},
          {"exposed_seconds", receipt.exposed_seconds},
          {"peak_rss_bytes", receipt.peak_rss_bytes},
          {"fault_sites", receipt.fault_sites}};
}

RankReceipt receipt_of(const Json& json) {
  RankReceipt receipt;
  json.at("rank").get_to(receipt.rank);
  json.at("host").get_to(receipt.host);
  json.at("pid").get_to(receipt.pid);
  json.at("rows").get_to(receipt.rows);
  json.at("bytes_sent").get_to(receipt.bytes_sent);
  json.at("messages").get_to(receipt.messages);
  json.at("seconds").get_to(receipt.seconds);
  json.at("exposed_seconds").get_to(receipt.exposed_seconds);
  json.at("peak_rss_bytes").get_to(receipt.peak_rss_bytes);
  json.at("fault_sites").get_to(receipt.fault_sites);
  return receipt;
}

std::string header_of(const LaneResult& result) {
  Json json{{"rows", result.rows},           {"heads", result.heads},
            {"value_dim", result.value_dim}, {"out_dtype", name_of(result.out_dtype)},
            {"problems", result.problems},   {"transport", result.transport},
            {"guarantee", result.guarantee}, {"isa", result.isa},
            {"numerics", result.numerics},   {"threads", result.threads},
            {"ranks", Json::array()}};
  for (const RankReceipt& receipt : result.ranks) json["ranks"].push_back(json_of(receipt));
  return json.dump();
}

LaneResult result_of(const Json& json) {
  const auto dtype = from_name<DType>(json.at("out_dtype").get<std::string>());
  invariant(dtype.has_value(), "a result file names no type");
  LaneResult result =
      make_lane_result(json.at("rows"), json.at("heads"), json.at("value_dim"), *dtype);
  json.at("problems").get_to(result.problems);
  json.at("transport").get_to(result.transport);
  json.at("guarantee").get_to(result.guarantee);
  json.at("isa").get_to(result.isa);
  json.at("numerics").get_to(result.numerics);
  json.at("threads").get_to(result.threads);
  for (const Json& receipt : json.at("ranks")) result.ranks.push_back(receipt_of(receipt));
  return result;
}

void write_buffer(std::ofstream& file, const Buffer& buffer, std::size_t bytes) {
  file.write(reinterpret_cast<const char*>(buffer.data()), static_cast<std::streamsize>(bytes));
}

void read_buffer(std::ifstream& file, const Buffer& buffer, std::size_t bytes) {
  file.read(reinterpret_cast<char*>(buffer.data()), static_cast<std::streamsize>(bytes));
}

}  // namespace

AnyTensor LaneResult::out_view() const {
  return contiguous_tensor(static_cast<void*>(out.data()), out_dtype, {rows, heads, value_dim});
}

AnyTensor LaneResult::lse_view() const {
  return contiguous_tensor(static_cast<void*>(lse.data()), DType::f32, {rows, heads, 1});
}

std::size_t LaneResult::out_bytes() const {
  return static_cast<std::size_t>(rows * heads * value_dim) * size_of(out_dtype);
}

std::size_t LaneResult::lse_bytes() const {
  return static_cast<std::size_t>(rows * heads) * sizeof(float);
}

LaneResult make_lane_result(std::int64_t rows, std::int64_t heads, std::int64_t value_dim,
                            DType out_dtype) {
  LaneResult result;
  result.rows = rows;
  result.heads = heads;
  result.value_dim = value_dim;
  result.out_dtype = out_dtype;
  result.out = Buffer(result.out_bytes());
  result.lse = Buffer(result.lse_bytes());
  result.deliveries = Buffer(static_cast<std::size_t>(rows));
  if (rows > 0) {  // all bits set is NaN in every type
    std::memset(result.out.data(), 0xff, result.out_bytes());
    std::memset(result.lse.data(), 0xff, result.lse_bytes());
  }
  return result;
}

void save_result(const std::string& path, const LaneResult& result) {
  const std::string header = header_of(result);
  const std::string partial = path + ".partial";
  std::ofstream file(partial, std::ios::binary | std::ios::trunc);
  file << header.size() << '\n' << header;
  write_buffer(file, result.out, result.out_bytes());
  write_buffer(file, result.lse, result.lse_bytes());
  write_buffer(file, result.deliveries, static_cast<std::size_t>(result.rows));
  file.close();
  require(file && std::rename(partial.c_str(), path.c_str()) == 0, "cannot write ", path,
          ": is the disk full? (TMPDIR chooses another place)");
}

std::optional<LaneResult> load_result(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return std::nullopt;
  std::size_t header_bytes = 0;
  file >> header_bytes;
  file.ignore(1);
  invariant(static_cast<bool>(file) && header_bytes < (std::size_t{1} << 30), path,
            " has no result header");
  std::string header(header_bytes, '\0');
  file.read(header.data(), static_cast<std::streamsize>(header_bytes));
  LaneResult result = result_of(Json::parse(header));
  read_buffer(file, result.out, result.out_bytes());
  read_buffer(file, result.lse, result.lse_bytes());
  read_buffer(file, result.deliveries, static_cast<std::size_t>(result.rows));
  invariant(static_cast<bool>(file), path, " is shorter than its header says");
  return result;
}

std::string to_text(const RankReceipt& receipt) { return json_of(receipt).dump(); }

RankReceipt receipt_from_text(std::string_view text) { return receipt_of(Json::parse(text)); }

}  // namespace cpattn
