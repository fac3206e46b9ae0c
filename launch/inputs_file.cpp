// Inputs from a safetensors file: which tensors belong together, what they must agree on, and rows
// on demand.
#include <algorithm>
#include <array>
#include <cmath>    // std::sqrt
#include <cstring>  // std::memcpy
#include <map>
#include <optional>
#include <string_view>

#include "launch/inputs_source.h"
#include "launch/safetensors.h"
#include "src/base/error.h"

namespace cpattn {
namespace {

/// Far above any model, far below where heads * head_dim * rows could overflow.
constexpr std::int64_t kMaxHeads = 1 << 20;

constexpr std::array<std::string_view, 7> kLeaves{
    "q", "k", "v", "dout", "dlse", "cu_seqlens", "cu_seqlens_kv"};

/// The tensors of one prefix, by the last part of their names.
struct Group {
  std::string prefix;  ///< "" or "layer.0"
  std::map<std::string_view, const StoredTensor*> tensors;

  const StoredTensor* find(std::string_view leaf) const {
    const auto place = tensors.find(leaf);
    return place == tensors.end() ? nullptr : place->second;
  }
  bool is_attention() const { return find("q") || find("k") || find("v"); }
  bool has_gradient() const { return find("dout") || find("dlse"); }
  std::string full_name(std::string_view leaf) const {
    return prefix.empty() ? std::string(leaf) : prefix + "." + std::string(leaf);
  }
};

std::string where(const std::string& path) { return "file '" + path + "': "; }

std::string where(const std::string& path, const StoredTensor& tensor) {
  return where(path) + "tensor " + quoted_name(tensor.name) + ": ";
}

/// Groups in the order in which the header first names them.
std::vector<Group> group_tensors(const SafetensorsFile& file) {
  std::vector<Group> groups;
  std::map<std::string, std::size_t, std::less<>> place;
  for (const StoredTensor& tensor : file.tensors()) {
    const std::string_view name = tensor.name;
    const std::size_t dot = name.rfind('.');
    const std::string_view prefix = dot == std::string_view::npos ? "" : name.substr(0, dot);
    const std::string_view leaf = dot == std::string_view::npos ? name : name.substr(dot + 1);
    if (std::find(kLeaves.begin(), kLeaves.end(), leaf) == kLeaves.end()) {
      // Other tensors are none of our business, but documents must not be lost by a name.
      require(!leaf.starts_with("cu_seqlen"), where(file.path(), tensor),
              "expected cu_seqlens or cu_seqlens_kv");
      continue;
    }
    // ".q" would share the prefix of "q".
    require(dot != 0, where(file.path(), tensor), "expected a prefix before the dot");
    const auto [entry, is_new] = place.emplace(prefix, groups.size());
    if (is_new) groups.push_back({.prefix = std::string(prefix), .tensors = {}});
    groups[entry->second].tensors[leaf] = &tensor;
  }
  return groups;
}

std::optional<DType> dtype_of(StoredType type) {
  if (type == StoredType::f32) return DType::f32;
  if (type == StoredType::f16) return DType::f16;
  if (type == StoredType::bf16) return DType::bf16;
  return std::nullopt;
}

void check_tensor(const std::string& path, const StoredTensor& tensor) {
  const std::string here = where(path, tensor);
  require(dtype_of(tensor.type).has_value(), here, "dtype ", name_of(tensor.type),
          ", expected F32, F16 or BF16");
  require(tensor.shape.size() == 3, here, tensor.shape.size(),
          " dimensions, expected three: [tokens, heads, head_dim]");
  require(tensor.shape[1] >= 1 && tensor.shape[1] <= kMaxHeads, here, tensor.shape[1],
          " heads, expected 1 to ", kMaxHeads);
  require(tensor.shape[2] >= 1 && tensor.shape[2] <= kMaxHeadDim, here, "head dimension ",
          tensor.shape[2], ", expected 1 to ", kMaxHeadDim);
}

AttentionShape shape_of(const std::string& path, const Group& group) {
  for (const char* leaf : {"q", "k", "v"}) {
    const StoredTensor* const tensor = group.find(leaf);
    require(tensor != nullptr, where(path), "no tensor ", quoted_name(group.full_name(leaf)),
            ", expected q, k and v of every prefix");
    check_tensor(path, *tensor);
  }
  const StoredTensor& q = *group.find("q");
  const StoredTensor& k = *group.find("k");
  const StoredTensor& v = *group.find("v");
  require(k.shape[2] == q.shape[2], where(path, k), "head dimension ", k.shape[2], ", expected ",
          q.shape[2], " as in ", quoted_name(q.name));
  require(v.shape[0] == k.shape[0], where(path, v), v.shape[0], " rows, expected ", k.shape[0],
          " as in ", quoted_name(k.name));
  require(v.shape[1] == k.shape[1], where(path, v), v.shape[1], " heads, expected ", k.shape[1],
          " as in ", quoted_name(k.name));
  require(q.shape[1] % k.shape[1] == 0, where(path, q), q.shape[1],
          " heads, expected a multiple of the ", k.shape[1], " of ", quoted_name(k.name));
  return {.num_heads = q.shape[1],
          .num_kv_heads = k.shape[1],
          .head_dim = q.shape[2],
          .value_dim = v.shape[2],
          .softmax_scale = 1.0 / std::sqrt(static_cast<double>(q.shape[2]))};
}

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text;
  for (const std::int64_t dim : shape) text += (text.empty() ? "[" : ", ") + std::to_string(dim);
  return text + "]";
}

/// dout and dlse, where they are given, have one row and head for each of q's.
void check_gradients(const std::string& path, const Group& group, const AttentionShape& shape) {
  const std::int64_t rows = group.find("q")->shape[0];
  const auto check = [&](std::string_view leaf, const std::vector<std::int64_t>& expected) {
    const StoredTensor* const tensor = group.find(leaf);
    if (tensor == nullptr) return;
    const std::string here = where(path, *tensor);
    require(dtype_of(tensor->type).has_value(), here, "dtype ", name_of(tensor->type),
            ", expected F32, F16 or BF16");
    require(tensor->shape == expected, here, "shape ", shape_text(tensor->shape), ", expected ",
            shape_text(expected));
  };
  check("dout", {rows, shape.num_heads, shape.value_dim});
  check("dlse", {rows, shape.num_heads});
}

template <class Integer>
std::vector<std::int64_t> copy_integers(const StoredTensor& tensor) {
  std::vector<Integer> stored(tensor.bytes.size() / sizeof(Integer));
  if (!stored.empty()) std::memcpy(stored.data(), tensor.bytes.data(), tensor.bytes.size());
  return {stored.begin(), stored.end()};
}

std::vector<std::int64_t> read_cu_seqlens(const std::string& path, const StoredTensor& tensor) {
  const std::string here = where(path, tensor);
  require(tensor.shape.size() == 1, here, tensor.shape.size(), " dimensions, expected one");
  require(tensor.type == StoredType::i32 || tensor.type == StoredType::i64, here, "dtype ",
          name_of(tensor.type), ", expected I32 or I64");
  return tensor.type == StoredType::i32 ? copy_integers<std::int32_t>(tensor)
                                        : copy_integers<std::int64_t>(tensor);
}

SequenceBatch batch_of(const std::string& path, const Group& group) {
  const std::int64_t q_rows = group.find("q")->shape[0];
  const std::int64_t kv_rows = group.find("k")->shape[0];
  const StoredTensor* const stored = group.find("cu_seqlens");
  const StoredTensor* const stored_kv = group.find("cu_seqlens_kv");
  if (stored == nullptr) {
    require(stored_kv == nullptr, where(path), "tensor ",
            quoted_name(group.full_name("cu_seqlens_kv")), " without cu_seqlens");
    return batch_of_one(q_rows, kv_rows);
  }
  require(stored_kv != nullptr || q_rows == kv_rows, where(path), "no tensor ",
          quoted_name(group.full_name("cu_seqlens_kv")), ", expected one since q has ", q_rows,
          " rows and k ", kv_rows);
  const std::vector<std::int64_t> cu = read_cu_seqlens(path, *stored);
  const std::vector<std::int64_t> cu_kv =
      stored_kv == nullptr ? cu : read_cu_seqlens(path, *stored_kv);
  try {
    return batch_from_cu_seqlens(cu, cu_kv, q_rows, kv_rows);
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(where(path, *stored) + error.what());
  }
}

/// Copies `count` elements of type From, at any alignment, and rounds each once to `To`.
template <class From, DType To>
void convert(const std::byte* from, std::int64_t count, std::byte* to) {
  for (std::int64_t i = 0; i < count; ++i) {
    From value;
    std::memcpy(&value, from + i * static_cast<std::int64_t>(sizeof(From)), sizeof(From));
    store_from_float(to, To, i, to_float(value));
  }
}

template <class From>
void convert_to(DType dtype, const std::byte* from, std::int64_t count, std::byte* to) {
  switch (dtype) {
    case DType::f32:
      return convert<From, DType::f32>(from, count, to);
    case DType::f16:
      return convert<From, DType::f16>(from, count, to);
    case DType::bf16:
      return convert<From, DType::bf16>(from, count, to);
  }
}

void convert_row(DType from_dtype, const std::byte* from, std::int64_t count, DType to_dtype,
                 std::byte* to) {
  if (from_dtype == to_dtype) {  // also keeps the payload of a NaN
    std::memcpy(to, from, static_cast<std::size_t>(count) * size_of(to_dtype));
    return;
  }
  switch (from_dtype) {
    case DType::f32:
      return convert_to<float>(to_dtype, from, count, to);
    case DType::f16:
      return convert_to<f16>(to_dtype, from, count, to);
    case DType::bf16:
      return convert_to<bf16>(to_dtype, from, count, to);
  }
}

class FileSource final : public InputSource {
 public:
  FileSource(std::shared_ptr<const SafetensorsFile> file, const Group& group)
      : file_(std::move(file)), group_(group) {
    const std::string& path = file_->path();
    info_.name = path.substr(path.rfind('/') + 1);  // npos + 1 is 0
    if (!group.prefix.empty()) info_.name += ":" + group.prefix;
    info_.shape = shape_of(path, group);
    check_gradients(path, group, info_.shape);
    info_.batch = batch_of(path, group);
    validate(info_.shape);
    validate(info_.batch);
    stand_in_ = make_synthetic({.shape = info_.shape, .batch = info_.batch});
  }

  const InputInfo& info() const override { return info_; }

  void read(TensorRole role, std::int64_t row_begin, const AnyTensor& dst) const override {
    detail::check_read(info_, role, row_begin, dst);
    file_->require_unchanged();
    const StoredTensor* const stored = group_.find(name_of(role));
    if (stored == nullptr) return stand_in_->read(role, row_begin, dst);  // dout or dlse
    const StoredTensor& tensor = *stored;
    const DType dtype = *dtype_of(tensor.type);
    const std::int64_t heads = dst.shape[1];
    const std::int64_t dim = dst.shape[2];
    const std::int64_t dim_bytes = dim * static_cast<std::int64_t>(size_of(dtype));
    for (std::int64_t i = 0; i < dst.shape[0]; ++i) {
      for (std::int64_t head = 0; head < heads; ++head) {
        const std::int64_t vector = (row_begin + i) * heads + head;
        convert_row(dtype, tensor.bytes.data() + vector * dim_bytes, dim, dst.dtype,
                    dst.row(i, head));
      }
    }
  }

 private:
  std::shared_ptr<const SafetensorsFile> file_;  // shared by the sources of one file
  Group group_;                                  // points into *file_
  InputInfo info_;
  std::unique_ptr<InputSource> stand_in_;  // for gradients that the file does not have
};

std::string list_of(const std::vector<Group>& groups) {
  constexpr std::size_t kShown = 16;
  std::string text;
  for (std::size_t i = 0; i < std::min(groups.size(), kShown); ++i) {
    text += (i > 0 ? ", " : "") + quoted_name(groups[i].prefix);
  }
  return groups.size() > kShown ? text + ", ..." : text;
}

}  // namespace

std::vector<std::unique_ptr<InputSource>> open_tensor_file(const std::string& path,
                                                           const std::string& only) {
  const auto file = std::make_shared<const SafetensorsFile>(path);
  std::vector<Group> groups = group_tensors(*file);

  std::map<std::string_view, const StoredTensor*> shared;  // the file's own cu_seqlens
  for (const Group& group : groups) {
    if (group.prefix.empty()) shared = group.tensors;
    const bool is_shared = group.prefix.empty() && !group.has_gradient();
    require(group.is_attention() || is_shared, where(path), "tensor ",
            quoted_name(group.tensors.begin()->second->name), " without q, k and v of its prefix");
  }
  std::erase_if(groups, [](const Group& group) { return !group.is_attention(); });
  require(!groups.empty(), where(path), "no tensors q, k, v or <prefix>.q, <prefix>.k, <prefix>.v");

  std::vector<std::unique_ptr<InputSource>> sources;
  for (Group& group : groups) {
    if (!only.empty() && group.prefix != only) continue;
    if (!group.find("cu_seqlens") && !group.find("cu_seqlens_kv")) {
      for (const char* leaf : {"cu_seqlens", "cu_seqlens_kv"}) {
        if (shared.count(leaf) == 1) group.tensors[leaf] = shared[leaf];
      }
    }
    sources.push_back(std::make_unique<FileSource>(file, group));
  }
  require(!sources.empty(), where(path), "no tensors of the prefix ", quoted_name(only),
          ", expected one of ", list_of(groups));
  return sources;
}

}  // namespace cpattn
