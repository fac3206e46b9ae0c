#include "src/comm/ordered_sum.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "src/base/error.h"
#include "src/device/memory.h"

namespace cpattn {
namespace {

/// Numbers of the result that are worked on at a time.
constexpr std::int64_t kWindow = std::int64_t{1} << 17;

/// A piece in the list that all ranks know, and the rank that has it.
struct Piece {
  TreeNode node;
  int rank = 0;
  std::int64_t begin() const { return node.index << node.level; }
  std::int64_t end() const { return (node.index + 1) << node.level; }
};

/// What a rank tells the others before any number moves.
struct Announcement {
  std::int64_t num_leaves = 0;
  std::int64_t size = 0;
  std::int64_t element_bytes = 0;
  std::vector<TreeNode> pieces;
  std::string refusal;
};

void append(std::vector<std::byte>& bytes, const void* data, std::size_t size) {
  const auto* first = static_cast<const std::byte*>(data);
  bytes.insert(bytes.end(), first, first + size);
}

std::vector<std::byte> written(const Announcement& mine) {
  std::vector<std::int64_t> numbers{mine.num_leaves, mine.size, mine.element_bytes,
                                    static_cast<std::int64_t>(mine.pieces.size())};
  for (const TreeNode& node : mine.pieces) {
    numbers.push_back(node.level);
    numbers.push_back(node.index);
  }
  std::vector<std::byte> bytes;
  append(bytes, numbers.data(), numbers.size() * sizeof(std::int64_t));
  append(bytes, mine.refusal.data(), mine.refusal.size());
  return bytes;
}

Announcement read(const std::vector<std::byte>& bytes) {
  std::size_t at = 0;
  const auto next = [&] {
    std::int64_t number = 0;
    require<CommError>(bytes.size() - at >= sizeof number, "ordered sum: a message of ",
                       bytes.size(), " bytes is too short");
    std::memcpy(&number, bytes.data() + at, sizeof number);
    at += sizeof number;
    return number;
  };
  Announcement theirs;
  theirs.num_leaves = next();
  theirs.size = next();
  theirs.element_bytes = next();
  for (std::int64_t left = next(); left > 0; --left) {
    const std::int64_t level = next(), index = next();
    require<CommError>(level >= 0 && level < 63 && index >= 0 && index <= (INT64_MAX >> level) - 1,
                       "ordered sum: no such tree node: level ", level, ", index ", index);
    theirs.pieces.push_back({static_cast<int>(level), index});
  }
  theirs.refusal.assign(reinterpret_cast<const char*>(bytes.data()) + at, bytes.size() - at);
  return theirs;
}

/// The same text on every rank, because all see the same announcements; "" when all is well.
std::string problems_in(const std::vector<Announcement>& all, std::vector<Piece>& pieces) {
  std::string text;
  const auto add = [&text](const auto&... parts) {
    text += detail::concat(text.empty() ? "" : "; ", parts...);
  };
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (!all[rank].refusal.empty()) add("rank ", rank, ": ", all[rank].refusal);
  }
  if (!text.empty()) return text;  // a rank that could not even begin has no sizes to compare
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    const auto compare = [&](const char* name, std::int64_t Announcement::*field) {
      if (all[rank].*field == all[0].*field) return;
      add(name, " differs between ranks: rank 0 has ", all[0].*field, ", rank ", rank, " has ",
          all[rank].*field);
    };
    compare("num_leaves", &Announcement::num_leaves);
    compare("size", &Announcement::size);
    compare("element bytes", &Announcement::element_bytes);
    for (const TreeNode& node : all[rank].pieces) pieces.push_back({node, static_cast<int>(rank)});
  }
  if (!text.empty()) return text;
  std::stable_sort(pieces.begin(), pieces.end(),
                   [](const Piece& a, const Piece& b) { return a.begin() < b.begin(); });
  for (std::size_t i = 1; i < pieces.size(); ++i) {
    if (pieces[i - 1].end() <= pieces[i].begin()) continue;
    add("leaf ", pieces[i].begin(), " was brought twice, by rank ", pieces[i - 1].rank,
        " and by rank ", pieces[i].rank);
  }
  return text;
}

/// left += right, both places in the sorted list of pieces.
struct Addition {
  std::size_t left = 0;
  std::size_t right = 0;
};

/// Lists the additions that make the node of pieces [first, last) and returns where its sum is.
std::size_t list_additions(const std::vector<Piece>& pieces, std::size_t first, std::size_t last,
                           TreeNode node, std::vector<Addition>& additions) {
  if (last - first == 1) return first;  // the one present child takes its parent's place
  const TreeNode left{node.level - 1, 2 * node.index}, right{node.level - 1, 2 * node.index + 1};
  const std::int64_t border = right.index << right.level;
  const auto middle = static_cast<std::size_t>(
      std::partition_point(pieces.begin() + static_cast<std::ptrdiff_t>(first),
                           pieces.begin() + static_cast<std::ptrdiff_t>(last),
                           [&](const Piece& piece) { return piece.begin() < border; }) -
      pieces.begin());
  if (middle == first) return list_additions(pieces, first, last, right, additions);
  if (middle == last) return list_additions(pieces, first, last, left, additions);
  const std::size_t a = list_additions(pieces, first, middle, left, additions);
  const std::size_t b = list_additions(pieces, middle, last, right, additions);
  additions.push_back({a, b});
  return a;
}

TreeNode root_over(std::int64_t num_leaves) {
  TreeNode root;
  while ((std::int64_t{1} << root.level) < num_leaves) ++root.level;
  return root;
}

/// Everybody's slices to everybody. The memory goes to the communicator when a wait fails, because
/// the transport may still touch it.
class Exchange {
 public:
  Exchange(Communicator& comm, Clock::time_point deadline) : comm_(comm), deadline_(deadline) {}

  /// outgoing[r] goes to rank r, incoming[r] comes from it; sizes are known on both sides, and
  /// empty messages are not sent. Both lie in the two buffers.
  void run(const std::vector<std::span<const std::byte>>& outgoing,
           const std::vector<std::span<std::byte>>& incoming, Buffer& send_memory,
           Buffer& receive_memory) {
    try {
      run(outgoing, incoming);
    } catch (...) {
      comm_.keep_until_end(std::move(send_memory));
      comm_.keep_until_end(std::move(receive_memory));
      throw;
    }
  }

 private:
  void run(const std::vector<std::span<const std::byte>>& outgoing,
           const std::vector<std::span<std::byte>>& incoming) {
    const int size = comm_.size(), rank = comm_.rank();
    std::vector<Pending> sends(outgoing.size()), receives(incoming.size());
    for (int distance = 1; distance < size; ++distance) {
      const auto from = static_cast<std::size_t>((rank + size - distance) % size);
      const auto to = static_cast<std::size_t>((rank + distance) % size);
      if (!incoming[from].empty())
        receives[from] = comm_.irecv(incoming[from], static_cast<int>(from), Tag::ordered_sum);
      if (!outgoing[to].empty())
        sends[to] = comm_.isend(outgoing[to], static_cast<int>(to), Tag::ordered_sum);
    }
    for (std::size_t peer = 0; peer < incoming.size(); ++peer) {
      finish(receives[peer], static_cast<int>(peer), incoming[peer].size(), false);
      finish(sends[peer], static_cast<int>(peer), outgoing[peer].size(), true);
    }
  }

  void finish(Pending& pending, int peer, std::size_t bytes, bool is_send) {
    if (!pending.is_active()) return;
    comm_.wait(pending, deadline_,
               {.what = "ordered sum",
                .peer = peer,
                .bytes = bytes,
                .is_send = is_send,
                .started = started_});
  }

  Communicator& comm_;
  Clock::time_point deadline_;
  Clock::time_point started_ = Clock::now();
};

/// Numbers [begin, end) of a window.
struct Slice {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::size_t count() const { return static_cast<std::size_t>(end - begin); }
};

/// Rank r adds up slice r of a window.
Slice slice_of(int rank, int world_size, std::int64_t window) {
  return {window * rank / world_size, window * (rank + 1) / world_size};
}

/// One reduction: the pieces of all ranks are known, numbers are added window by window.
template <class T>
class Reducer {
 public:
  Reducer(Communicator& comm, const std::vector<Piece>& pieces, std::int64_t num_leaves,
          Clock::time_point deadline)
      : comm_(comm),
        exchange_(comm, deadline),
        pieces_(pieces),
        pieces_of_(static_cast<std::size_t>(comm.size())) {
    if (!pieces.empty())
      root_ = list_additions(pieces, 0, pieces.size(), root_over(num_leaves), additions_);
    for (std::size_t i = 0; i < pieces.size(); ++i)
      pieces_of_[static_cast<std::size_t>(pieces[i].rank)].push_back(i);
  }

  /// `mine[i]` is this rank's i-th piece, in the order of their leaves.
  void run(const std::vector<const T*>& mine, std::span<T> result) {
    const auto size = static_cast<std::int64_t>(result.size());
    const std::int64_t longest = std::min(size, kWindow);
    const Slice widest{0, longest / comm_.size() + 1};
    Buffer pieces_out(mine.size() * static_cast<std::size_t>(longest) * sizeof(T));
    Buffer pieces_in(pieces_.size() * widest.count() * sizeof(T));
    Buffer sums(static_cast<std::size_t>(longest) * sizeof(T));
    for (std::int64_t first = 0; first < size; first += kWindow) {
      const std::int64_t window = std::min(kWindow, size - first);
      send_pieces(mine, first, window, pieces_out, pieces_in);
      const Slice own = slice_of(comm_.rank(), comm_.size(), window);
      for (const Addition& addition : additions_) {
        T* left = pieces_in.as<T>() + place_[addition.left];
        const T* right = pieces_in.as<T>() + place_[addition.right];
        for (std::size_t i = 0; i < own.count(); ++i) left[i] = left[i] + right[i];
      }
      T* const sum = sums.as<T>();
      if (pieces_.empty()) {
        std::fill_n(sum, window, T{0});
      } else {
        std::copy_n(pieces_in.as<T>() + place_[root_], own.count(), sum + own.begin);
      }
      share_sums(window, sums);
      std::copy_n(sum, window, result.data() + first);
    }
  }

 private:
  /// Brings my slice of all pieces to `in`, where place_ says.
  void send_pieces(const std::vector<const T*>& mine, std::int64_t first, std::int64_t window,
                   Buffer& out, Buffer& in) {
    const int size = comm_.size();
    const auto ranks = static_cast<std::size_t>(size);
    std::vector<std::span<const std::byte>> outgoing(ranks);
    std::vector<std::span<std::byte>> incoming(ranks);
    const Slice own = slice_of(comm_.rank(), size, window);
    place_.assign(pieces_.size(), 0);
    T* to = out.as<T>();
    T* from = in.as<T>();
    for (std::size_t peer = 0; peer < ranks; ++peer) {
      const Slice theirs = slice_of(static_cast<int>(peer), size, window);
      T* const message = to;
      for (const T* piece : mine)
        to = std::copy_n(piece + first + theirs.begin, theirs.count(), to);
      outgoing[peer] = std::as_bytes(std::span(message, to));
      T* const arrived = from;
      for (const std::size_t piece : pieces_of_[peer]) {
        place_[piece] = from - in.as<T>();
        from += own.count();
      }
      incoming[peer] = std::as_writable_bytes(std::span(arrived, from));
    }
    const auto me = static_cast<std::size_t>(comm_.rank());
    std::copy(outgoing[me].begin(), outgoing[me].end(), incoming[me].begin());
    exchange_.run(outgoing, incoming, out, in);
  }

  void share_sums(std::int64_t window, Buffer& sums) {
    const auto ranks = static_cast<std::size_t>(comm_.size());
    std::vector<std::span<const std::byte>> outgoing(ranks);
    std::vector<std::span<std::byte>> incoming(ranks);
    const auto bytes_of = [&](int rank) {
      const Slice slice = slice_of(rank, comm_.size(), window);
      return std::as_writable_bytes(std::span(sums.as<T>() + slice.begin, slice.count()));
    };
    for (std::size_t peer = 0; peer < ranks; ++peer) {
      outgoing[peer] = bytes_of(comm_.rank());
      incoming[peer] = bytes_of(static_cast<int>(peer));
    }
    Buffer nothing;
    exchange_.run(outgoing, incoming, sums, nothing);
  }

  Communicator& comm_;
  Exchange exchange_;
  const std::vector<Piece>& pieces_;
  std::vector<std::vector<std::size_t>> pieces_of_;  // by rank, places in pieces_
  std::vector<Addition> additions_;
  std::size_t root_ = 0;
  std::vector<std::ptrdiff_t> place_;  // of each piece in the incoming memory
};

}  // namespace

template <class T>
OrderedSum<T>::OrderedSum(std::int64_t num_leaves, std::int64_t size)
    : num_leaves_(num_leaves), size_(size), tree_(num_leaves) {
  constexpr std::int64_t kMaxLeaves = std::int64_t{1} << 62;  // the end of every node is a number
  require(num_leaves >= 0 && num_leaves <= kMaxLeaves, "num_leaves ", num_leaves,
          ": expected 0 to ", kMaxLeaves);
  require(size >= 0, "size ", size, ": expected at least 0");
}

template <class T>
bool OrderedSum<T>::has(std::int64_t leaf) const {
  return std::any_of(tree_.pending().begin(), tree_.pending().end(), [leaf](const auto& piece) {
    return (leaf >> piece.first.level) == piece.first.index;
  });
}

template <class T>
void OrderedSum<T>::refuse(const std::string& why) {
  if (refusal_.empty()) refusal_ = why;  // the first says enough
}

template <class T>
void OrderedSum<T>::add(std::int64_t leaf, std::span<const T> values) {
  if (leaf < 0 || leaf >= num_leaves_)
    return refuse(detail::concat("leaf ", leaf, ": expected 0 <= leaf < ", num_leaves_));
  if (static_cast<std::int64_t>(values.size()) != size_)
    return refuse(
        detail::concat("leaf ", leaf, " has ", values.size(), " numbers, expected ", size_));
  if (has(leaf)) return refuse(detail::concat("leaf ", leaf, " was brought twice"));
  if (free_.empty()) {
    free_.push_back(static_cast<int>(values_.size()));
    values_.emplace_back();
  }
  const int id = free_.back();
  free_.pop_back();
  values_[static_cast<std::size_t>(id)].assign(values.begin(), values.end());
  tree_.add(leaf, id, [this](int left, int right) {
    std::vector<T>& sum = values_[static_cast<std::size_t>(left)];
    const std::vector<T>& other = values_[static_cast<std::size_t>(right)];
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] = sum[i] + other[i];
    free_.push_back(right);
    return left;
  });
}

template <class T>
void OrderedSum<T>::clear() {
  tree_ = ReductionTree(num_leaves_);
  refusal_.clear();
  free_.clear();
  for (std::size_t id = values_.size(); id-- > 0;) free_.push_back(static_cast<int>(id));
}

template <class T>
void OrderedSum<T>::all_reduce(Communicator& comm, std::span<T> result,
                               Clock::time_point deadline) {
  if (static_cast<std::int64_t>(result.size()) != size_)
    refuse(detail::concat("result has ", result.size(), " numbers, expected ", size_));
  Announcement announcement{num_leaves_, size_, sizeof(T), {}, refusal_};
  std::vector<std::pair<TreeNode, const T*>> own;
  for (const auto& [node, id] : tree_.pending())
    own.emplace_back(node, values_[static_cast<std::size_t>(id)].data());
  std::sort(own.begin(), own.end(), [](const auto& a, const auto& b) {
    return (a.first.index << a.first.level) < (b.first.index << b.first.level);
  });
  std::vector<const T*> mine;
  for (const auto& [node, values] : own) {
    announcement.pieces.push_back(node);
    mine.push_back(values);
  }
  clear();  // the values stay until the next add()

  std::vector<Announcement> all;
  for (const auto& bytes : comm.all_gather(written(announcement), deadline, "ordered sum"))
    all.push_back(read(bytes));
  std::vector<Piece> pieces;
  const std::string problems = problems_in(all, pieces);
  require(problems.empty(), problems);
  Reducer<T>(comm, pieces, num_leaves_, deadline).run(mine, result);
}

template class OrderedSum<float>;
template class OrderedSum<double>;

}  // namespace cpattn
