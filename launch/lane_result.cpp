#include "launch/lane_result.h"

#include <cstdio>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

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
          {"backward_seconds", receipt.backward_seconds},
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
  json.at("backward_seconds").get_to(receipt.backward_seconds);
  json.at("exposed_seconds").get_to(receipt.exposed_seconds);
  json.at("peak_rss_bytes").get_to(receipt.peak_rss_bytes);
  json.at("fault_sites").get_to(receipt.fault_sites);
  return receipt;
}

std::string header_of(const LaneResult& result) {
  Json json{{"q_rows", result.q_rows},       {"kv_rows", result.kv_rows},
            {"problems", result.problems},   {"transport", result.transport},
            {"guarantee", result.guarantee}, {"isa", result.isa},
            {"numerics", result.numerics},   {"threads", result.threads},
            {"tensors", Json::array()},      {"ranks", Json::array()}};
  for (const ResultTensor& tensor : result.tensors) {
    json["tensors"].push_back({{"role", name_of(tensor.role)},
                               {"dtype", name_of(tensor.dtype)},
                               {"shape", tensor.shape}});
  }
  for (const RankReceipt& receipt : result.ranks) json["ranks"].push_back(json_of(receipt));
  return json.dump();
}

template <NamedEnum E>
E named(const Json& json) {
  const auto value = from_name<E>(json.get<std::string>());
  invariant(value.has_value(), "a result file names ", json.dump(), ", expected ", choices<E>());
  return *value;
}

void allocate(ResultTensor& tensor) {
  tensor.memory = Buffer(tensor.bytes());
  // All bits set is NaN in every type.
  if (tensor.bytes() > 0) std::memset(tensor.memory.data(), 0xff, tensor.bytes());
}

void allocate_deliveries(LaneResult& result) {
  result.q_deliveries = Buffer(static_cast<std::size_t>(result.q_rows));
  result.kv_deliveries = Buffer(static_cast<std::size_t>(result.kv_rows));
}

LaneResult result_of(const Json& json) {
  LaneResult result;
  json.at("q_rows").get_to(result.q_rows);
  json.at("kv_rows").get_to(result.kv_rows);
  json.at("problems").get_to(result.problems);
  json.at("transport").get_to(result.transport);
  json.at("guarantee").get_to(result.guarantee);
  json.at("isa").get_to(result.isa);
  json.at("numerics").get_to(result.numerics);
  json.at("threads").get_to(result.threads);
  for (const Json& item : json.at("tensors")) {
    ResultTensor tensor;
    tensor.role = named<ResultRole>(item.at("role"));
    tensor.dtype = named<DType>(item.at("dtype"));
    item.at("shape").get_to(tensor.shape);
    allocate(tensor);
    result.tensors.push_back(std::move(tensor));
  }
  for (const Json& receipt : json.at("ranks")) result.ranks.push_back(receipt_of(receipt));
  allocate_deliveries(result);
  return result;
}

/// Calls visit(memory, bytes) for everything a result file holds after its header.
template <class Visit>
void for_each_buffer(const LaneResult& result, Visit&& visit) {
  for (const ResultTensor& tensor : result.tensors) visit(tensor.memory.data(), tensor.bytes());
  visit(result.q_deliveries.data(), static_cast<std::size_t>(result.q_rows));
  visit(result.kv_deliveries.data(), static_cast<std::size_t>(result.kv_rows));
}

}  // namespace

AnyTensor ResultTensor::view() const {
  return contiguous_tensor(static_cast<void*>(memory.data()), dtype, shape);
}

std::size_t ResultTensor::row_bytes() const {
  return static_cast<std::size_t>(shape[1] * shape[2]) * size_of(dtype);
}

std::vector<ResultTensor> make_result_tensors(const Problem& problem, bool has_gradients,
                                              std::int64_t q_rows, std::int64_t kv_rows) {
  const AttentionShape& shape = problem.shape;
  std::vector<ResultTensor> tensors;
  const auto add = [&](ResultRole role, DType dtype, std::int64_t heads, std::int64_t dim) {
    ResultTensor tensor;
    tensor.role = role;
    tensor.dtype = dtype;
    tensor.shape = {has_key_rows(role) ? kv_rows : q_rows, heads, dim};
    allocate(tensor);
    tensors.push_back(std::move(tensor));
  };
  add(ResultRole::out, problem.out_dtype, shape.num_heads, shape.value_dim);
  add(ResultRole::lse, DType::f32, shape.num_heads, 1);
  if (!has_gradients) return tensors;
  add(ResultRole::dq, problem.dtype, shape.num_heads, shape.head_dim);
  add(ResultRole::dk, problem.dtype, shape.num_kv_heads, shape.head_dim);
  add(ResultRole::dv, problem.dtype, shape.num_kv_heads, shape.value_dim);
  return tensors;
}

const ResultTensor* LaneResult::find(ResultRole role) const {
  for (const ResultTensor& tensor : tensors) {
    if (tensor.role == role) return &tensor;
  }
  return nullptr;
}

LaneResult make_lane_result(const Problem& problem, bool has_gradients) {
  LaneResult result;
  result.q_rows = problem.batch.q_rows;
  result.kv_rows = problem.batch.kv_rows;
  result.tensors = make_result_tensors(problem, has_gradients, result.q_rows, result.kv_rows);
  allocate_deliveries(result);
  return result;
}

void save_result(const std::string& path, const LaneResult& result) {
  const std::string header = header_of(result);
  const std::string partial = path + ".partial";
  std::ofstream file(partial, std::ios::binary | std::ios::trunc);
  file << header.size() << '\n' << header;
  for_each_buffer(result, [&](const std::byte* data, std::size_t bytes) {
    file.write(reinterpret_cast<const char*>(data), static_cast<std::streamsize>(bytes));
  });
  file.close();
  require<InternalError>(file && std::rename(partial.c_str(), path.c_str()) == 0, "cannot write ",
                         path, ": is the disk full? (TMPDIR chooses another place)");
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
  for_each_buffer(result, [&](std::byte* data, std::size_t bytes) {
    file.read(reinterpret_cast<char*>(data), static_cast<std::streamsize>(bytes));
  });
  invariant(static_cast<bool>(file), path, " is shorter than its header says");
  return result;
}

std::string to_text(const RankReceipt& receipt) { return json_of(receipt).dump(); }

RankReceipt receipt_from_text(std::string_view text) { return receipt_of(Json::parse(text)); }

}  // namespace cpattn
