#include "launch/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>  // std::memcpy, std::strerror
#include <fstream>
#include <numeric>  // std::iota

#include "launch/safetensors_header.h"
#include "src/base/error.h"

namespace cpattn {
namespace {

static_assert(std::endian::native == std::endian::little, "tensor bytes are used as they lie");

constexpr std::size_t kLengthBytes = 8;

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(shape[i]);
  }
  return text + "]";
}

/// Bytes of a tensor; false when they do not fit into 64 bits.
bool count_bytes(StoredType type, const std::vector<std::int64_t>& shape, std::uint64_t& bytes) {
  bytes = size_of(type);
  for (const std::int64_t dim : shape) {
    if (dim < 0) return false;
    if (__builtin_mul_overflow(bytes, static_cast<std::uint64_t>(dim), &bytes)) return false;
  }
  return true;
}

void check_entry(const std::string& path, const HeaderEntry& entry, std::uint64_t data_bytes) {
  const std::string here =
      detail::concat("file '", path, "': tensor ", quoted_name(entry.name), ": ");
  std::uint64_t expected = 0;
  require(count_bytes(entry.type, entry.shape, expected), here, "shape ", shape_text(entry.shape),
          " of ", name_of(entry.type), " does not fit into 64 bits");
  require(entry.begin <= entry.end, here, "data_offsets [", entry.begin, ", ", entry.end,
          "]: expected begin <= end");
  require(entry.end <= data_bytes, here, "data_offsets end at ", entry.end,
          ", but the file holds only ", data_bytes, " bytes of data");
  require(entry.end - entry.begin == expected, here, "data_offsets span ", entry.end - entry.begin,
          " bytes, expected ", expected, " for shape ", shape_text(entry.shape), " of ",
          name_of(entry.type));
}

/// The tensors must tile the data: begin where the previous one ends, no byte left over.
void check_tiling(const std::string& path, const std::vector<HeaderEntry>& entries,
                  std::uint64_t data_bytes) {
  std::vector<std::size_t> order(entries.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return std::pair(entries[a].begin, entries[a].end) <
           std::pair(entries[b].begin, entries[b].end);
  });
  std::uint64_t next = 0;
  for (const std::size_t i : order) {
    const HeaderEntry& entry = entries[i];
    require(entry.begin == next, "file '", path, "': tensor ", quoted_name(entry.name),
            ": data_offsets begin at ", entry.begin, ", expected ", next,
            entry.begin < next ? " (it overlaps another tensor)" : " (bytes of no tensor between)");
    next = entry.end;
  }
  require(next == data_bytes, "file '", path, "': ", data_bytes - next,
          " bytes after the last tensor, expected none");
}

std::uint64_t read_length(std::span<const std::byte> bytes) {
  std::uint64_t length = 0;
  std::memcpy(&length, bytes.data(), kLengthBytes);
  return length;
}

}  // namespace

std::size_t size_of(StoredType type) {
  switch (type) {
    case StoredType::boolean:
    case StoredType::u8:
    case StoredType::i8:
    case StoredType::f8_e5m2:
    case StoredType::f8_e4m3:
      return 1;
    case StoredType::i16:
    case StoredType::u16:
    case StoredType::f16:
    case StoredType::bf16:
      return 2;
    case StoredType::i32:
    case StoredType::u32:
    case StoredType::f32:
      return 4;
    case StoredType::i64:
    case StoredType::u64:
    case StoredType::f64:
      return 8;
  }
  return 0;
}

std::string quoted_name(std::string_view name, std::size_t max_shown) {
  constexpr std::string_view kHex = "0123456789abcdef";
  std::string text = "'";
  for (const char c : name.substr(0, max_shown)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte < 0x7f) {
      text += c;
    } else {
      text += {'\\', 'x', kHex[byte >> 4], kHex[byte & 15]};
    }
  }
  if (name.size() > max_shown) text += "...";
  return text + "'";
}

// Delegating first makes the object complete, so that its destructor runs when the body throws.
MappedFile::MappedFile(const std::string& path) : MappedFile() {
  path_ = path;
  // Without O_NONBLOCK, opening a FIFO would wait for a writer.
  descriptor_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  require(descriptor_ >= 0, "file '", path, "': ", std::strerror(errno));
  struct stat status {};
  const bool is_known = ::fstat(descriptor_, &status) == 0;
  require(is_known, "file '", path, "': ", std::strerror(errno));
  require(S_ISREG(status.st_mode), "file '", path, "': not a regular file");
  if (status.st_size == 0) return;  // nothing to map

  const auto size = static_cast<std::size_t>(status.st_size);
  void* const memory = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, descriptor_, 0);
  require(memory != MAP_FAILED, "file '", path, "': cannot map ", size,
          " bytes: ", std::strerror(errno));
  data_ = static_cast<std::byte*>(memory);
  size_bytes_ = size;
  require_unchanged();
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(data_, size_bytes_);
  if (descriptor_ >= 0) ::close(descriptor_);
}

void MappedFile::require_unchanged() const {
  struct stat status {};
  const bool is_known = ::fstat(descriptor_, &status) == 0;
  require(is_known, "file '", path_, "': ", std::strerror(errno));
  require(static_cast<std::size_t>(status.st_size) == size_bytes_, "file '", path_,
          "': its size changed from ", size_bytes_, " to ", status.st_size,
          " bytes while it was open");
}

SafetensorsFile::SafetensorsFile(const std::string& path) : path_(path), file_(path) {
  const std::span<const std::byte> bytes = file_.bytes();
  require(bytes.size() >= kLengthBytes, "file '", path, "': ", bytes.size(),
          " bytes, expected at least the ", kLengthBytes, " of the header length");
  const std::uint64_t header_bytes = read_length(bytes);
  require(header_bytes <= kMaxHeaderBytes, "file '", path, "': header of ", header_bytes,
          " bytes, expected at most ", kMaxHeaderBytes, " (is this a safetensors file?)");
  require(header_bytes <= bytes.size() - kLengthBytes, "file '", path, "': header of ",
          header_bytes, " bytes in a file of ", bytes.size(), " bytes: truncated");

  const std::string_view json(reinterpret_cast<const char*>(bytes.data()) + kLengthBytes,
                              header_bytes);
  SafetensorsHeader header = parse_safetensors_header(path, json);
  const std::span<const std::byte> content = bytes.subspan(kLengthBytes + header_bytes);
  for (const HeaderEntry& entry : header.entries) check_entry(path, entry, content.size());
  check_tiling(path, header.entries, content.size());

  metadata_ = std::move(header.metadata);
  tensors_.reserve(header.entries.size());
  for (HeaderEntry& entry : header.entries) {
    tensors_.push_back({std::move(entry.name), entry.type, std::move(entry.shape),
                        content.subspan(entry.begin, entry.end - entry.begin)});
  }
}

const StoredTensor* SafetensorsFile::find(std::string_view name) const {
  const auto place = std::find_if(tensors_.begin(), tensors_.end(),
                                  [&](const StoredTensor& tensor) { return tensor.name == name; });
  return place == tensors_.end() ? nullptr : &*place;
}

void write_safetensors(const std::string& path, std::span<const StoredTensor> tensors,
                       const std::map<std::string, std::string>& metadata) {
  SafetensorsHeader header{{}, metadata};
  std::uint64_t next = 0;
  for (const StoredTensor& tensor : tensors) {
    const std::uint64_t begin = next;
    next += tensor.bytes.size();
    header.entries.push_back({tensor.name, tensor.type, tensor.shape, begin, next});
  }
  for (const HeaderEntry& entry : header.entries) check_entry(path, entry, next);
  const std::string text = safetensors_header_text(header);

  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  const std::uint64_t length = text.size();
  file.write(reinterpret_cast<const char*>(&length), kLengthBytes);
  file.write(text.data(), static_cast<std::streamsize>(text.size()));
  for (const StoredTensor& tensor : tensors) {
    file.write(reinterpret_cast<const char*>(tensor.bytes.data()),
               static_cast<std::streamsize>(tensor.bytes.size()));
  }
  file.close();
  require(!file.fail(), "file '", path, "': could not be written: ", std::strerror(errno));
}

}  // namespace cpattn
