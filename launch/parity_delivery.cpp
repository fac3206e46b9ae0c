#include "launch/parity_delivery.h"

#include <cstring>
#include <string_view>

#include "src/base/error.h"

namespace cpattn {
namespace {

/// Takes a message apart from front to back.
class Reader {
 public:
  explicit Reader(std::span<const std::byte> message) : rest_(message) {}

  std::span<const std::byte> take(std::size_t bytes) {
    invariant(bytes <= rest_.size(), "a delivery ends ", bytes - rest_.size(), " bytes too early");
    const auto part = rest_.first(bytes);
    rest_ = rest_.subspan(bytes);
    return part;
  }
  std::size_t left() const { return rest_.size(); }

 private:
  std::span<const std::byte> rest_;
};

void count_rows(const std::vector<std::int64_t>& rows, unsigned char* deliveries) {
  for (const std::int64_t row : rows) {
    if (deliveries[row] < 255) ++deliveries[row];
  }
}

}  // namespace

std::vector<std::byte> pack_delivery(const RankReceipt& receipt,
                                     std::span<const ResultTensor> tensors) {
  const std::string text = to_text(receipt);
  const std::uint64_t text_bytes = text.size();
  std::size_t bytes = sizeof(text_bytes) + text.size();
  for (const ResultTensor& tensor : tensors) bytes += tensor.bytes();
  std::vector<std::byte> message(bytes);
  std::byte* place = message.data();
  const auto append = [&](const void* from, std::size_t size) {
    if (size == 0) return;
    std::memcpy(place, from, size);
    place += size;
  };
  append(&text_bytes, sizeof(text_bytes));
  append(text.data(), text.size());
  for (const ResultTensor& tensor : tensors) append(tensor.memory.data(), tensor.bytes());
  return message;
}

void unpack_delivery(std::span<const std::byte> message, const Shard& shard, LaneResult& result) {
  Reader reader(message);
  std::uint64_t text_bytes = 0;
  std::memcpy(&text_bytes, reader.take(sizeof(text_bytes)).data(), sizeof(text_bytes));
  const auto text = reader.take(static_cast<std::size_t>(text_bytes));
  result.ranks.push_back(
      receipt_from_text({reinterpret_cast<const char*>(text.data()), text.size()}));
  const std::vector<std::int64_t> q_rows = global_rows(shard.q);
  const std::vector<std::int64_t> kv_rows = global_rows(shard.kv);
  bool has_key_rows_delivered = false;
  for (const ResultTensor& tensor : result.tensors) {
    const bool of_keys = has_key_rows(tensor.role);
    has_key_rows_delivered |= of_keys;
    for (const std::int64_t row : of_keys ? kv_rows : q_rows) {
      const auto bytes = reader.take(tensor.row_bytes());
      std::memcpy(tensor.memory.data() + static_cast<std::size_t>(row) * bytes.size(), bytes.data(),
                  bytes.size());
    }
  }
  invariant(reader.left() == 0, "a delivery of ", message.size(), " bytes, ", reader.left(),
            " too many");
  count_rows(q_rows, result.deliveries(false));
  if (has_key_rows_delivered) count_rows(kv_rows, result.deliveries(true));
}

}  // namespace cpattn
