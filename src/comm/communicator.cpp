#include "src/comm/communicator.h"

#include <algorithm>
#include <cmath>  // std::round
#include <cstring>
#include <map>
#include <thread>

#include "src/base/digest.h"
#include "src/base/error.h"
#include "src/comm/message_transfer.h"

namespace cpattn {

namespace {

/// Precedes the bytes of every collective message: how many follow, and that both ends mean the
/// same collective.
struct CollectiveHeader {
  std::uint64_t what;
  std::uint64_t bytes;
};

std::uint64_t digest_of(std::string_view what) {
  Digest digest;
  digest.add(what);
  return digest.value();
}

}  // namespace

std::string late_text(int rank, const WaitContext& context, Seconds waited) {
  const double seconds = std::round(waited.count() * 1e3) / 1e3;
  const std::string place =
      context.step >= 0 ? detail::concat("step ", context.step) : std::string(context.what);
  const std::string peer =
      context.peer >= 0 ? detail::concat("rank ", context.peer) : std::string("the others");
  if (context.is_send) {
    return detail::concat("rank ", rank, ": ", place, ": ", peer, " did not take ", context.bytes,
                          " bytes within ", seconds, " s");
  }
  return detail::concat("rank ", rank, ": ", place, ": nothing from ", peer, " within ", seconds,
                        " s (", context.bytes, " bytes expected)");
}

void Communicator::check_peer(int peer) const {
  require(peer >= 0 && peer < size(), "rank ", rank(), ": peer ", peer, " is not in [0, ", size(),
          ")");
}

void Communicator::wait(Pending& pending, Clock::time_point deadline, const WaitContext& context) {
  const bool has_start = context.started != Clock::time_point{};
  const Clock::time_point started = has_start ? context.started : Clock::now();
  while (!test(pending)) {
    if (Clock::now() >= deadline)
      throw CommError(
          late_text(rank(), context, std::max(Seconds(0), Seconds(deadline - started))));
    std::this_thread::yield();
  }
}

std::unique_ptr<Transfer> Communicator::make_transfer(ExchangeKind kind,
                                                      const TransferOptions& options) {
  return std::make_unique<MessageTransfer>(*this, kind, options);
}

void Communicator::leak_kept_memory() noexcept {
  for (Buffer& bytes : kept_) bytes.release();
  kept_.clear();
}

/// One message with its header, both ways, as all_gather and gather need it. Its memory is handed
/// to the communicator when a wait fails, because a transport may touch it after that.
struct Communicator::Collective {
  Communicator& comm;
  Clock::time_point deadline;
  std::string_view what;
  Clock::time_point started = Clock::now();
  Buffer headers{2 * sizeof(CollectiveHeader)};  // ours, then the peer's
  Buffer outgoing;
  Buffer incoming;

  Collective(Communicator& owner, std::span<const std::byte> mine, Clock::time_point until,
             std::string_view name)
      : comm(owner), deadline(until), what(name), outgoing(mine.size()) {
    const CollectiveHeader header{digest_of(what), mine.size()};
    std::memcpy(headers.data(), &header, sizeof header);
    if (!mine.empty()) std::memcpy(outgoing.data(), mine.data(), mine.size());
  }

  std::span<std::byte> header(int index) const {
    return headers.bytes().subspan(index * sizeof(CollectiveHeader), sizeof(CollectiveHeader));
  }

  void wait(Pending& pending, int peer, std::size_t bytes, bool is_send) {
    comm.wait(pending, deadline,
              {.what = what, .peer = peer, .bytes = bytes, .is_send = is_send, .started = started});
  }

  void give_memory_away() noexcept {
    comm.keep_until_end(std::move(headers));
    comm.keep_until_end(std::move(outgoing));
    comm.keep_until_end(std::move(incoming));
  }

  std::vector<std::byte> receive(int peer) {
    Pending head = comm.irecv(header(1), peer, Tag::gather);
    wait(head, peer, sizeof(CollectiveHeader), false);
    CollectiveHeader theirs;
    std::memcpy(&theirs, header(1).data(), sizeof theirs);
    require<CommError>(theirs.what == digest_of(what), "rank ", comm.rank(), ": ", what, ": rank ",
                       peer, " is in another collective");
    incoming = Buffer(theirs.bytes);
    if (theirs.bytes == 0) return {};
    Pending body = comm.irecv(incoming.bytes(), peer, Tag::gather);
    wait(body, peer, theirs.bytes, false);
    return {incoming.bytes().begin(), incoming.bytes().end()};
  }

  struct Sends {
    Pending head, body;
  };
  Sends start_send(int peer) {
    Sends sends{comm.isend(header(0), peer, Tag::gather), {}};
    if (outgoing.size_bytes() > 0) sends.body = comm.isend(outgoing.bytes(), peer, Tag::gather);
    return sends;
  }
  void finish_send(Sends& sends, int peer) {
    wait(sends.head, peer, sizeof(CollectiveHeader), true);
    if (sends.body.is_active()) wait(sends.body, peer, outgoing.size_bytes(), true);
  }
};

std::vector<std::vector<std::byte>> Communicator::all_gather(std::span<const std::byte> mine,
                                                             Clock::time_point deadline,
                                                             std::string_view what) {
  std::vector<std::vector<std::byte>> all(size());
  all[rank()].assign(mine.begin(), mine.end());
  Collective collective(*this, mine, deadline, what);
  try {
    // All sends before the first wait: nobody waits for a rank that only waits for the late one.
    std::vector<Collective::Sends> sends(size());
    for (int distance = 1; distance < size(); ++distance) {
      const int peer = (rank() + distance) % size();
      sends[peer] = collective.start_send(peer);
    }
    for (int distance = 1; distance < size(); ++distance) {
      const int peer = (rank() + size() - distance) % size();
      all[peer] = collective.receive(peer);
    }
    for (int peer = 0; peer < size(); ++peer) {
      if (peer != rank()) collective.finish_send(sends[peer], peer);
    }
  } catch (...) {
    collective.give_memory_away();
    throw;
  }
  return all;
}

std::vector<std::vector<std::byte>> Communicator::gather(std::span<const std::byte> mine, int root,
                                                         Clock::time_point deadline,
                                                         std::string_view what) {
  check_peer(root);
  std::vector<std::vector<std::byte>> all(rank() == root ? size() : 0);
  Collective collective(*this, mine, deadline, what);
  try {
    if (rank() != root) {
      Collective::Sends sends = collective.start_send(root);
      collective.finish_send(sends, root);
    } else {
      for (int peer = 0; peer < size(); ++peer) {
        if (peer != root) all[peer] = collective.receive(peer);
      }
      all[root].assign(mine.begin(), mine.end());
    }
  } catch (...) {
    collective.give_memory_away();
    throw;
  }
  return all;
}

void Communicator::barrier(Clock::time_point deadline, std::string_view what) {
  all_gather({}, deadline, what);
}

namespace {

constexpr std::string_view kAbsent = "(absent)";

/// One rank's lines: the keys in their order, and each key's value (several joined by ", ").
struct KeyedLines {
  std::vector<std::string> keys;
  std::map<std::string, std::string> values;
};

KeyedLines parse_lines(std::string_view text) {
  KeyedLines lines;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (line.empty()) continue;
    const std::size_t equals = std::min(line.find('='), line.size());
    const std::string key(line.substr(0, equals));
    const std::string value(line.substr(std::min(equals + 1, line.size())));
    const auto [place, is_new] = lines.values.emplace(key, value);
    if (is_new) {
      lines.keys.push_back(key);
    } else {
      place->second += ", " + value;
    }
  }
  return lines;
}

/// Texts in the order of the first rank that has them, each with its ranks.
using RanksByText = std::vector<std::pair<std::string, std::vector<std::size_t>>>;

void add_to(RanksByText& groups, std::string_view text, std::size_t rank) {
  auto group = std::find_if(groups.begin(), groups.end(),
                            [&](const auto& entry) { return entry.first == text; });
  if (group == groups.end()) group = groups.insert(group, {std::string(text), {}});
  group->second.push_back(rank);
}

/// "rank 0", "ranks 1, 2"
std::string names_of(const std::vector<std::size_t>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i)
    text += (i > 0 ? ", " : "") + std::to_string(ranks[i]);
  return text;
}

/// "sharding differs between ranks: rank 0 has zigzag, ranks 1, 2 have contiguous", or "" when
/// equal.
std::string describe_difference(const std::string& key, const std::vector<KeyedLines>& all) {
  RanksByText groups;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    const auto found = all[rank].values.find(key);
    add_to(groups, found == all[rank].values.end() ? kAbsent : found->second, rank);
  }
  if (groups.size() < 2) return "";

  std::string text = key + " differs between ranks: ";
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const auto& [value, ranks] = groups[g];
    text += (g > 0 ? ", " : "") + names_of(ranks);
    text += (ranks.size() == 1 ? " has " : " have ") + value;
  }
  return text;
}

}  // namespace

void agree(Communicator& comm, std::string_view lines, Clock::time_point deadline) {
  constexpr std::size_t kMaxKeysNamed = 8;
  const auto texts = comm.all_gather(std::as_bytes(std::span(lines)), deadline, "agree");
  const bool is_equal = std::all_of(texts.begin(), texts.end(),
                                    [&](const auto& text) { return text == texts.front(); });
  if (is_equal) return;

  std::vector<KeyedLines> all;
  std::vector<std::string> keys;
  for (const auto& text : texts) {
    all.push_back(parse_lines({reinterpret_cast<const char*>(text.data()), text.size()}));
    for (const std::string& key : all.back().keys) {
      if (std::find(keys.begin(), keys.end(), key) == keys.end()) keys.push_back(key);
    }
  }
  std::string message;
  std::size_t num_differing = 0;
  for (const std::string& key : keys) {
    const std::string difference = describe_difference(key, all);
    if (difference.empty() || ++num_differing > kMaxKeysNamed) continue;
    message += (message.empty() ? "" : "; ") + difference;
  }
  if (num_differing > kMaxKeysNamed)
    message += detail::concat("; and ", num_differing - kMaxKeysNamed, " more");
  if (message.empty()) message = "the order of the agreed lines differs between ranks";
  throw InvalidArgument(message);
}

void refuse_together(Communicator& comm, std::string_view mine, Clock::time_point deadline,
                     std::string_view what) {
  const auto texts = comm.all_gather(std::as_bytes(std::span(mine)), deadline, what);
  RanksByText refusals;
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    const std::string_view text(reinterpret_cast<const char*>(texts[rank].data()),
                                texts[rank].size());
    if (!text.empty()) add_to(refusals, text, rank);
  }
  std::string all;
  for (const auto& [text, ranks] : refusals)
    all += detail::concat(all.empty() ? "" : "; ", names_of(ranks), ": ", text);
  require(all.empty(), all);
}

}  // namespace cpattn
