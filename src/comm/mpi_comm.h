// MpiSession and MpiCommunicator: ranks as MPI processes, host memory.
//
// Policy: MPI_THREAD_FUNNELED, everything is called from one thread. Open MPI moves bytes only
// inside its own calls, so whoever computes must call test() or RingExchange::poll() now and then.
// MPI errors come back as CommError with MPI's text.
#pragma once

#define OMPI_SKIP_MPICXX 1  // the C interface only
#include <mpi.h>

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "src/comm/communicator.h"

namespace cpattn {

/// MPI_Init_thread for this scope. The destructor finalizes, which waits for all ranks; it leaves
/// without doing so when an exception is passing through or after give_up(), because ranks that
/// failed never arrive there.
class MpiSession {
 public:
  /// InvalidArgument when MPI is initialised already, Unsupported when it cannot be funneled.
  MpiSession(int* argc, char*** argv);
  ~MpiSession();
  MpiSession(const MpiSession&) = delete;
  MpiSession& operator=(const MpiSession&) = delete;

  void give_up() noexcept { has_failed_ = true; }

 private:
  int exceptions_at_start_;
  bool has_failed_ = false;
};

struct MpiOptions {
  /// Longer messages are cut into pieces of this size; the same on every rank, below 2^31.
  std::size_t max_message_bytes = std::size_t{1} << 30;
};

/// This rank among the ranks that share its memory: what a default thread count divides by.
struct NodePlace {
  int rank = 0;
  int size = 1;
};

class MpiCommunicator final : public Communicator {
 public:
  /// Duplicates `parent` (all of MPI_COMM_WORLD, or the caller's subgroup), so that our messages
  /// never meet the caller's. Collective over `parent`, which may be freed afterwards.
  /// InvalidArgument on every rank when any of them has a limit outside [1, INT_MAX] or limits
  /// differ; on this rank alone for MPI_COMM_NULL, and when MPI is not running: nobody can be told.
  explicit MpiCommunicator(MPI_Comm parent, const MpiOptions& options = {});
  explicit MpiCommunicator(const MpiOptions& options = {})
      : MpiCommunicator(MPI_COMM_WORLD, options) {}

  /// Takes part in the other ranks' construction only to refuse it: InvalidArgument on every rank.
  /// For bindings, whose own arguments may be wrong.
  [[noreturn]] static void refuse(MPI_Comm parent, std::string_view why);
  ~MpiCommunicator() override;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string_view transport() const override { return "mpi"; }
  std::size_t max_message_bytes() const override { return max_message_bytes_; }
  /// What this MPI library says of itself, at run time.
  bool takes_device_memory() const override;
  Pending isend(std::span<const std::byte> bytes, int peer, Tag tag) override;
  Pending irecv(std::span<std::byte> bytes, int peer, Tag tag) override;
  bool test(Pending& pending) override;
  /// MPI_Abort; `reason` is for the caller to print.
  void abort(int exit_code, std::string_view reason) noexcept override;

  /// The communicator of the ranks that passed the same `color`, ordered by `key`. Collective.
  std::unique_ptr<MpiCommunicator> split(int color, int key) const;

  /// Collective.
  NodePlace node_place() const;

  /// MPI messages posted so far, both ways: ceil(bytes / max_message_bytes) of each message, at
  /// least one.
  std::int64_t num_mpi_messages() const { return num_mpi_messages_; }

 private:
  struct Unchecked {};
  MpiCommunicator(MPI_Comm parent, Unchecked);
  void set_limit_together(const MpiOptions& options, std::string_view refusal);

  static constexpr int kWindow = 4;  // pieces of one message in flight; enough to hide a round trip

  struct Operation {
    bool is_active = false;
    bool is_send = false;
    int peer = -1;
    int tag = 0;
    const std::byte* source = nullptr;
    std::byte* target = nullptr;
    std::size_t size_bytes = 0;
    std::int64_t num_pieces = 0;
    std::int64_t num_posted = 0;
    std::int64_t num_done = 0;
    std::array<MPI_Request, kWindow> window{};  // piece i is at i % kWindow
    std::string error{};                        // thrown by its own test()

    bool is_same_channel(const Operation& other) const {
      return is_send == other.is_send && peer == other.peer && tag == other.tag;
    }
  };

  Pending add(Operation operation);
  int piece_bytes(const Operation& operation) const;
  bool may_post(int id) const;
  void post_pieces(int id);
  bool post_send(Operation& operation);
  bool post_receive(Operation& operation);
  void advance(int id);
  void check(int code, std::string_view call) const;

  MPI_Comm comm_ = MPI_COMM_NULL;
  int rank_ = 0;
  int size_ = 0;
  std::size_t max_message_bytes_ = MpiOptions{}.max_message_bytes;
  std::int64_t num_mpi_messages_ = 0;
  std::vector<Operation> operations_;  // slots, reused
  std::vector<int> free_;              // slots not in use
  std::vector<int> active_;            // slots in use, in posting order
};

}  // namespace cpattn
