#include "src/comm/mpi_comm.h"

#if defined(OPEN_MPI)
#include <mpi-ext.h>  // MPIX_Query_cuda_support
#endif

#include <algorithm>
#include <climits>
#include <exception>

#include "src/base/error.h"
#include "src/base/integers.h"

namespace cpattn {

namespace {

std::string mpi_text(int code) {
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  if (MPI_Error_string(code, text.data(), &length) != MPI_SUCCESS)
    return "MPI error " + std::to_string(code);
  return {text.data(), static_cast<std::size_t>(length)};
}

bool is_initialized() {
  int flag = 0;
  MPI_Initialized(&flag);
  return flag != 0;
}

bool is_finalized() {
  int flag = 0;
  MPI_Finalized(&flag);
  return flag != 0;
}

}  // namespace

MpiSession::MpiSession(int* argc, char*** argv) : exceptions_at_start_(std::uncaught_exceptions()) {
  require(!is_initialized(), "MPI is initialised already: pass its communicator instead");
  int provided = MPI_THREAD_SINGLE;
  const int code = MPI_Init_thread(argc, argv, MPI_THREAD_FUNNELED, &provided);
  require<CommError>(code == MPI_SUCCESS, "MPI_Init_thread failed with code ", code);
  require<Unsupported>(provided >= MPI_THREAD_FUNNELED, "this MPI offers thread level ", provided,
                       ", needed is MPI_THREAD_FUNNELED (", MPI_THREAD_FUNNELED, ")");
}

MpiSession::~MpiSession() {
  if (has_failed_ || std::uncaught_exceptions() > exceptions_at_start_ || is_finalized()) return;
  MPI_Finalize();
}

// A constructor that throws frees nothing, but one that has delegated does: so what is refused is
// refused after the delegation.
MpiCommunicator::MpiCommunicator(MPI_Comm parent, const MpiOptions& options)
    : MpiCommunicator(parent, Unchecked{}) {
  const std::size_t bytes = options.max_message_bytes;
  const bool is_limit = bytes >= 1 && bytes <= INT_MAX;
  set_limit_together(
      options,
      is_limit ? "" : detail::concat("max_message_bytes ", bytes, ": expected 1 to ", INT_MAX));
}

void MpiCommunicator::refuse(MPI_Comm parent, std::string_view why) {
  MpiCommunicator(parent, Unchecked{}).set_limit_together({}, why.empty() ? "refused" : why);
  throw InternalError("internal error: a refused communicator was made");
}

void MpiCommunicator::set_limit_together(const MpiOptions& options, std::string_view refusal) {
  constexpr Seconds kTimeout{
      60.0};  // all ranks are here already: duplicating brought them together
  refuse_together(*this, refusal, deadline_after(kTimeout), "group check");
  agree(*this, detail::concat("max_message_bytes=", options.max_message_bytes, '\n'),
        deadline_after(kTimeout));
  max_message_bytes_ = options.max_message_bytes;
  num_mpi_messages_ = 0;
}

MpiCommunicator::MpiCommunicator(MPI_Comm parent, Unchecked) {
  // MPI itself would end the process.
  require(is_initialized() && !is_finalized(),
          "MPI is not running: MPI_Init (or an MpiSession) comes first, MPI_Finalize last");
  require(parent != MPI_COMM_NULL,
          "communicator is MPI_COMM_NULL: this process is not in the group");
  check(MPI_Comm_dup(parent, &comm_), "MPI_Comm_dup");
  check(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  check(MPI_Comm_rank(comm_, &rank_), "MPI_Comm_rank");
  check(MPI_Comm_size(comm_, &size_), "MPI_Comm_size");
}

MpiCommunicator::~MpiCommunicator() {
  if (is_finalized()) return;
  if (active_.empty()) {
    MPI_Comm_free(&comm_);
  } else {
    leak_kept_memory();  // MPI may still touch it
  }
}

void MpiCommunicator::check(int code, std::string_view call) const {
  if (code != MPI_SUCCESS) [[unlikely]]
    throw CommError(detail::concat("rank ", rank_, ": ", call, ": ", mpi_text(code)));
}

std::unique_ptr<MpiCommunicator> MpiCommunicator::split(int color, int key) const {
  MPI_Comm group = MPI_COMM_NULL;
  check(MPI_Comm_split(comm_, color, key, &group), "MPI_Comm_split");
  auto part =
      std::make_unique<MpiCommunicator>(group, MpiOptions{.max_message_bytes = max_message_bytes_});
  check(MPI_Comm_free(&group), "MPI_Comm_free");
  return part;
}

NodePlace MpiCommunicator::node_place() const {
  MPI_Comm node = MPI_COMM_NULL;
  check(MPI_Comm_split_type(comm_, MPI_COMM_TYPE_SHARED, rank_, MPI_INFO_NULL, &node),
        "MPI_Comm_split_type");
  NodePlace place;
  check(MPI_Comm_rank(node, &place.rank), "MPI_Comm_rank");
  check(MPI_Comm_size(node, &place.size), "MPI_Comm_size");
  check(MPI_Comm_free(&node), "MPI_Comm_free");
  return place;
}

Pending MpiCommunicator::isend(std::span<const std::byte> bytes, int peer, Tag tag) {
  check_peer(peer);
  return add({.is_active = true,
              .is_send = true,
              .peer = peer,
              .tag = static_cast<int>(tag),
              .source = bytes.data(),
              .size_bytes = bytes.size()});
}

Pending MpiCommunicator::irecv(std::span<std::byte> bytes, int peer, Tag tag) {
  check_peer(peer);
  return add({.is_active = true,
              .is_send = false,
              .peer = peer,
              .tag = static_cast<int>(tag),
              .target = bytes.data(),
              .size_bytes = bytes.size()});
}

Pending MpiCommunicator::add(Operation operation) {
  const std::size_t pieces = ceil_div(operation.size_bytes, max_message_bytes_);
  operation.num_pieces = static_cast<std::int64_t>(std::max<std::size_t>(pieces, 1));
  if (free_.empty()) {
    free_.push_back(static_cast<int>(operations_.size()));
    operations_.emplace_back();
  }
  const int id = free_.back();
  free_.pop_back();
  operations_[id] = std::move(operation);
  active_.push_back(id);
  advance(id);  // an error is thrown by test(), as if it had come later
  return {id};
}

/// Of the piece to post next.
int MpiCommunicator::piece_bytes(const Operation& operation) const {
  const std::size_t begin = static_cast<std::size_t>(operation.num_posted) * max_message_bytes_;
  return narrow<int>(std::min(max_message_bytes_, operation.size_bytes - begin));
}

/// A channel is FIFO only if no message's first piece overtakes an earlier message's last one.
bool MpiCommunicator::may_post(int id) const {
  for (const int earlier : active_) {
    if (earlier == id) break;
    const Operation& other = operations_[earlier];
    if (other.num_posted < other.num_pieces && other.is_same_channel(operations_[id])) return false;
  }
  return true;
}

void MpiCommunicator::post_pieces(int id) {
  Operation& operation = operations_[id];
  if (operation.num_posted == operation.num_pieces || !may_post(id)) return;
  while (operation.num_posted < operation.num_pieces &&
         operation.num_posted - operation.num_done < kWindow) {
    if (!(operation.is_send ? post_send(operation) : post_receive(operation))) return;
    ++operation.num_posted;
    ++num_mpi_messages_;
  }
}

bool MpiCommunicator::post_send(Operation& operation) {
  const std::size_t begin = static_cast<std::size_t>(operation.num_posted) * max_message_bytes_;
  check(MPI_Isend(operation.source + begin, piece_bytes(operation), MPI_BYTE, operation.peer,
                  operation.tag, comm_, &operation.window[operation.num_posted % kWindow]),
        "MPI_Isend");
  return true;
}

/// A receive posted ahead would trust the sender's length: Open MPI's single-copy path writes all
/// of a longer message before it reports the truncation, and a message to oneself is cut silently.
/// So the message is probed, its length compared, and only then received. Nothing is lost: bytes
/// move inside our calls only, with either.
bool MpiCommunicator::post_receive(Operation& operation) {
  int has_arrived = 0;
  MPI_Message message = MPI_MESSAGE_NULL;
  MPI_Status status;
  check(MPI_Improbe(operation.peer, operation.tag, comm_, &has_arrived, &message, &status),
        "MPI_Improbe");
  if (!has_arrived) return false;

  const int expected = piece_bytes(operation);
  int count = MPI_UNDEFINED;
  check(MPI_Get_count(&status, MPI_BYTE, &count), "MPI_Get_count");
  require<CommError>(count == expected, "rank ", rank_, ": a message from rank ", operation.peer,
                     ", tag ", operation.tag, ", has ", count, " bytes, ", expected,
                     " expected (piece ", operation.num_posted + 1, " of ", operation.num_pieces,
                     ")");
  const std::size_t begin = static_cast<std::size_t>(operation.num_posted) * max_message_bytes_;
  check(MPI_Imrecv(operation.target + begin, count, MPI_BYTE, &message,
                   &operation.window[operation.num_posted % kWindow]),
        "MPI_Imrecv");
  return true;
}

void MpiCommunicator::advance(int id) {
  Operation& operation = operations_[id];
  if (!operation.error.empty()) return;
  try {
    post_pieces(id);
    while (operation.num_done < operation.num_posted) {
      int is_complete = 0;
      check(MPI_Test(&operation.window[operation.num_done % kWindow], &is_complete,
                     MPI_STATUS_IGNORE),
            operation.is_send ? "sending" : "receiving");
      if (!is_complete) return;
      ++operation.num_done;
      post_pieces(id);
    }
  } catch (const CommError& error) {
    operation.error = error.what();
  }
}

bool MpiCommunicator::test(Pending& pending) {
  invariant(pending.is_active() && pending.id < static_cast<std::int64_t>(operations_.size()) &&
                operations_[pending.id].is_active,
            "rank ", rank_, ": test() of a message that is not active");
  const int id = static_cast<int>(pending.id);
  // MPI_Test progresses whatever is posted; what is not posted yet is up to us.
  for (const int other : active_) {
    if (other != id && operations_[other].num_posted < operations_[other].num_pieces) {
      advance(other);
    }
  }
  advance(id);
  if (!operations_[id].error.empty()) throw CommError(operations_[id].error);
  if (operations_[id].num_done < operations_[id].num_pieces) return false;

  operations_[id].is_active = false;
  active_.erase(std::find(active_.begin(), active_.end(), id));
  free_.push_back(id);
  pending = {};
  return true;
}

void MpiCommunicator::abort(int exit_code, std::string_view /*reason*/) noexcept {
  MPI_Abort(comm_, exit_code);
}

bool MpiCommunicator::takes_device_memory() const {
#if defined(MPIX_CUDA_AWARE_SUPPORT)
  return MPIX_Query_cuda_support() == 1;
#else
  return false;
#endif
}

}  // namespace cpattn
