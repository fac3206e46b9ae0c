// Safetensors files: named tensors behind a JSON header, mapped read-only, and a small writer.
//
// A file is: header length (8 bytes, little-endian), JSON header {name: {dtype, shape,
// data_offsets}, optional "__metadata__": {string: string}}, then the bytes of the tensors without
// holes. Nothing in a file is trusted: every number is checked before it is used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "src/base/enum_names.h"

namespace cpattn {

/// Element types of the format that take whole bytes.
enum class StoredType {
  boolean,
  u8,
  i8,
  f8_e5m2,
  f8_e4m3,
  i16,
  u16,
  f16,
  bf16,
  i32,
  u32,
  f32,
  i64,
  u64,
  f64
};

template <>
struct EnumNames<StoredType> {
  static constexpr std::array kValues{NamedValue<StoredType>{StoredType::boolean, "BOOL"},
                                      NamedValue<StoredType>{StoredType::u8, "U8"},
                                      NamedValue<StoredType>{StoredType::i8, "I8"},
                                      NamedValue<StoredType>{StoredType::f8_e5m2, "F8_E5M2"},
                                      NamedValue<StoredType>{StoredType::f8_e4m3, "F8_E4M3"},
                                      NamedValue<StoredType>{StoredType::i16, "I16"},
                                      NamedValue<StoredType>{StoredType::u16, "U16"},
                                      NamedValue<StoredType>{StoredType::f16, "F16"},
                                      NamedValue<StoredType>{StoredType::bf16, "BF16"},
                                      NamedValue<StoredType>{StoredType::i32, "I32"},
                                      NamedValue<StoredType>{StoredType::u32, "U32"},
                                      NamedValue<StoredType>{StoredType::f32, "F32"},
                                      NamedValue<StoredType>{StoredType::i64, "I64"},
                                      NamedValue<StoredType>{StoredType::u64, "U64"},
                                      NamedValue<StoredType>{StoredType::f64, "F64"}};
};

std::size_t size_of(StoredType type);

/// A longer header is refused before it is read (the limit the format itself sets).
inline constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;
inline constexpr std::size_t kMaxStoredDims = 16;

/// One tensor of an open file. `bytes` is row-major, little-endian and not aligned to anything:
/// copy elements out, do not cast.
struct StoredTensor {
  std::string name;
  StoredType type = StoredType::f32;
  std::vector<std::int64_t> shape;
  std::span<const std::byte> bytes;
};

/// A whole file mapped read-only; unmapped on destruction. Pages are read when they are touched.
class MappedFile {
 public:
  /// InvalidArgument when `path` is not a readable regular file.
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return {data_, size_bytes_}; }

  /// InvalidArgument when the file no longer has the size it was mapped with: touching pages that a
  /// truncation took away would end the process. Cost: one fstat.
  void require_unchanged() const;

 private:
  MappedFile() = default;
  std::string path_;
  int descriptor_ = -1;
  std::byte* data_ = nullptr;
  std::size_t size_bytes_ = 0;
};

class SafetensorsFile {
 public:
  /// Maps the file and reads its header. InvalidArgument names file, tensor, value and expectation
  /// for whatever is malformed: truncation, JSON that is not the header's grammar, duplicate names,
  /// unknown types, shapes that overflow, offsets out of range, overlapping or leaving holes.
  /// Cost: the header's pages only.
  explicit SafetensorsFile(const std::string& path);

  const std::string& path() const { return path_; }
  /// In the order of the header.
  const std::vector<StoredTensor>& tensors() const { return tensors_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  /// nullptr when there is none of that name.
  const StoredTensor* find(std::string_view name) const;
  void require_unchanged() const { file_.require_unchanged(); }

 private:
  std::string path_;
  MappedFile file_;
  std::vector<StoredTensor> tensors_;
  std::map<std::string, std::string> metadata_;
};

/// Writes `tensors` in the given order, data aligned to 8 bytes. InvalidArgument when a shape does
/// not match its bytes, a name occurs twice, or the file cannot be written.
void write_safetensors(const std::string& path, std::span<const StoredTensor> tensors,
                       const std::map<std::string, std::string>& metadata = {});

/// A name as messages show it: quoted, control and non-ASCII bytes escaped, cut after `max_shown`.
std::string quoted_name(std::string_view name, std::size_t max_shown = 80);

}  // namespace cpattn
