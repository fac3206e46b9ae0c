#include "cp/bindings/c_convert.h"

#include <charconv>
#include <cmath>
#include <limits>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

#include "src/base/integers.h"

namespace cpattn::c {
namespace {

/// "" when `text` is a value of the field, which then has it; otherwise what was expected.
template <class Value>
std::string parse(std::string_view text, Value& value) {
  if constexpr (NamedEnum<Value>) {
    const auto found = from_name<Value>(text);
    if (!found) return choices<Value>();
    value = *found;
  } else if constexpr (std::is_same_v<Value, bool>) {
    if (text != "true" && text != "false") return "true | false";
    value = text == "true";
  } else {
    Value parsed{};
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), parsed);
    if (error != std::errc() || end != text.data() + text.size())
      return std::is_integral_v<Value> ? "an integer" : "a number";
    value = parsed;
  }
  return "";
}

/// Sets the field named `key`; false when there is none. `problem` is what is wrong with the value.
bool set_field(CpConfig& config, std::string_view key, std::string_view text,
               std::string& problem) {
  bool is_known = false;
  for_each_cp_field(config, [&](const FieldInfo& field, auto& value) {
    if (field.name != key) return;
    is_known = true;
    problem = parse(text, value);
  });
  return is_known;
}

std::string known_keys() {
  std::string keys;
  CpConfig config;
  for_each_cp_field(config,
                    [&](const FieldInfo& field, auto&) { keys += std::string(field.name) + ", "; });
  return keys + "isa";
}

DType dtype_of(cpattn_dtype dtype, std::string_view name) {
  switch (dtype) {
    case CPATTN_F32:
      return DType::f32;
    case CPATTN_F16:
      return DType::f16;
    case CPATTN_BF16:
      return DType::bf16;
  }
  throw InvalidArgument(detail::concat(name, ": dtype ", static_cast<int>(dtype),
                                       ", expected CPATTN_F32, CPATTN_F16 or CPATTN_BF16"));
}

std::vector<std::int64_t> numbers_of(const std::int64_t* numbers, std::int64_t count) {
  return {numbers, numbers + count};
}

GpuExchange exchange_of(cpattn_exchange exchange) {
  switch (exchange) {
    case CPATTN_EXCHANGE_AUTO:
      return GpuExchange::automatic;
    case CPATTN_EXCHANGE_NCCL:
      return GpuExchange::nccl;
    case CPATTN_EXCHANGE_HOST:
      return GpuExchange::host;
  }
  throw InvalidArgument(detail::concat("exchange ", static_cast<int>(exchange),
                                       ": expected CPATTN_EXCHANGE_AUTO, _NCCL or _HOST"));
}

SequenceBatch batch_of(const cpattn_problem& problem) {
  // As many as there can be in memory; so one more is a number, too.
  constexpr auto kMaxDocuments =
      std::numeric_limits<std::int64_t>::max() / static_cast<std::int64_t>(sizeof(Document));
  require(problem.num_documents >= 0 && problem.num_documents <= kMaxDocuments, "num_documents ",
          problem.num_documents, ": expected 0 to ", kMaxDocuments);
  require(problem.documents == nullptr || problem.cu_seqlens_q == nullptr,
          "documents and cu_seqlens_q are both set: expected one");
  require(problem.cu_seqlens_kv == nullptr || problem.cu_seqlens_q != nullptr,
          "cu_seqlens_kv without cu_seqlens_q");
  if (problem.documents != nullptr) {
    SequenceBatch batch{{}, problem.q_rows, problem.kv_rows};
    for (std::int64_t i = 0; i < problem.num_documents; ++i) {
      const cpattn_document& document = problem.documents[i];
      batch.documents.push_back(
          {document.q_begin, document.q_tokens, document.kv_begin, document.kv_tokens});
    }
    return batch;
  }
  if (problem.cu_seqlens_q != nullptr) {
    const auto q = numbers_of(problem.cu_seqlens_q, problem.num_documents + 1);
    const auto kv = problem.cu_seqlens_kv == nullptr
                        ? q
                        : numbers_of(problem.cu_seqlens_kv, problem.num_documents + 1);
    return batch_from_cu_seqlens(q, kv, problem.q_rows, problem.kv_rows);
  }
  require(problem.num_documents == 0, "num_documents is ", problem.num_documents,
          " but neither documents nor cu_seqlens_q is set");
  return batch_of_one(problem.q_rows, problem.kv_rows);
}

AnyTensor tensor_of(const cpattn_tensor& tensor, std::string_view name) {
  AnyTensor view{tensor.data, dtype_of(tensor.dtype, name), {}, {}};
  for (std::size_t axis = 0; axis < 3; ++axis) {
    view.shape[axis] = tensor.shape[axis];
    view.strides[axis] = tensor.strides[axis];
  }
  return view;
}

TensorView<float, 2> matrix_of(const cpattn_matrix& matrix) {
  return {matrix.data, {matrix.shape[0], matrix.shape[1]}, {matrix.strides[0], matrix.strides[1]}};
}

TensorView<const float, 2> const_matrix_of(const cpattn_matrix& matrix) {
  const TensorView<float, 2> view = matrix_of(matrix);
  return {view.data, view.shape, view.strides};
}

/// A caller's two functions and what they are called with.
struct CallerMemory {
  void* (*allocate)(void* context, size_t size, void* stream);
  void (*free)(void* context, void* memory);
  void* context;
};

CudaAllocator allocator_of(const cpattn_cuda_options& options) {
  require((options.allocate == nullptr) == (options.free == nullptr),
          "allocate and free: one is NULL, expected both or none");
  if (options.allocate == nullptr) return {};
  const auto caller = std::make_shared<CallerMemory>(
      CallerMemory{options.allocate, options.free, options.allocator_context});
  return {.allocate =
              [](void* context, std::size_t size_bytes, Stream stream) {
                const auto& memory = *static_cast<const CallerMemory*>(context);
                return memory.allocate(memory.context, size_bytes, stream.handle);
              },
          .free =
              [](void* context, void* address) noexcept {
                const auto& memory = *static_cast<const CallerMemory*>(context);
                memory.free(memory.context, address);
              },
          .context = caller.get(),
          .owner = caller};
}

}  // namespace

Settings settings_of(std::span<const cpattn_setting> settings) {
  Settings result;
  std::string problems, isa = "auto";
  std::set<std::string_view> seen;
  const auto refuse = [&problems](const auto&... parts) {
    problems += detail::concat(problems.empty() ? "" : "; ", parts...);
  };
  for (std::size_t i = 0; i < settings.size(); ++i) {
    if (settings[i].key == nullptr || settings[i].value == nullptr) {
      refuse("settings[", i, "]: NULL key or value");
      continue;
    }
    const std::string_view key = settings[i].key, value = settings[i].value;
    if (!seen.insert(key).second) {
      refuse(key, ": set twice");
      continue;
    }
    std::string expected;
    if (key == "isa") {
      if (value != "auto" && !from_name<Isa>(value)) expected = "auto | " + choices<Isa>();
      isa = value;
    } else if (!set_field(result.config, key, value, expected)) {
      refuse("unknown key \"", key, "\": expected one of ", known_keys());
    }
    if (!expected.empty()) refuse(key, " is \"", value, "\", expected ", expected);
  }
  require(problems.empty(), problems);
  if (isa != "auto") result.kernels = &find_kernels(*from_name<Isa>(isa));
  return result;
}

Problem problem_of(const cpattn_problem* given) {
  const cpattn_problem problem = read_struct(given, "problem");
  Problem result;
  result.shape.num_heads = problem.num_heads;
  result.shape.num_kv_heads = problem.num_kv_heads;
  result.shape.head_dim = problem.head_dim;
  result.shape.value_dim = problem.value_dim != 0 ? problem.value_dim : problem.head_dim;
  result.shape.softmax_scale = problem.has_softmax_scale != 0
                                   ? problem.softmax_scale
                                   : 1.0 / std::sqrt(static_cast<double>(problem.head_dim));
  result.dtype = dtype_of(problem.dtype, "problem.dtype");
  result.out_dtype = dtype_of(problem.out_dtype, "problem.out_dtype");
  result.batch = batch_of(problem);
  return result;
}

GpuOptions gpu_options_of(const cpattn_cuda_options* given) {
  const cpattn_cuda_options options = read_struct(given, "cuda_options");
  GpuOptions result;
  result.device = options.device;
  result.exchange = exchange_of(options.exchange);
  result.nccl_comm = options.nccl_comm;
  if (options.backend != nullptr) result.backend = options.backend;
  require(is_timeout(options.timeout_seconds), "timeout_seconds is ", options.timeout_seconds,
          ", expected 0.001 to ", kLongestTimeout);
  result.timeout = Seconds(options.timeout_seconds);
  result.allocator = allocator_of(options);
  return result;
}

AnyTensor tensor_of(const cpattn_tensor* tensor, std::string_view name) {
  require(tensor != nullptr, name, ": NULL");
  return tensor_of(*tensor, name);
}

ForwardTensors tensors_of(const cpattn_forward_tensors* given) {
  const cpattn_forward_tensors tensors = read_struct(given, "forward_tensors");
  return {.q = tensor_of(tensors.q, "q"),
          .k = tensor_of(tensors.k, "k"),
          .v = tensor_of(tensors.v, "v"),
          .out = tensor_of(tensors.out, "out"),
          .lse = matrix_of(tensors.lse),
          .head_maxima = {tensors.head_maxima, {tensors.q.shape[1]}, {1}}};
}

BackwardTensors tensors_of(const cpattn_backward_tensors* given) {
  const cpattn_backward_tensors tensors = read_struct(given, "backward_tensors");
  return {.q = tensor_of(tensors.q, "q"),
          .k = tensor_of(tensors.k, "k"),
          .v = tensor_of(tensors.v, "v"),
          .out = tensor_of(tensors.out, "out"),
          .lse = const_matrix_of(tensors.lse),
          .dout = tensor_of(tensors.dout, "dout"),
          .dlse = const_matrix_of(tensors.dlse),
          .dq = tensor_of(tensors.dq, "dq"),
          .dk = tensor_of(tensors.dk, "dk"),
          .dv = tensor_of(tensors.dv, "dv")};
}

}  // namespace cpattn::c
