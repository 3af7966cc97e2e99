// One call of a collective: its envelope, its check and its chunk streams.
//
//   enter   puts the envelope (arguments, small payload) to every other rank;
//   check   waits for all envelopes: throws the same Mismatch on every rank, and Timeout if one
//           never arrives. First chunks may be sent before it, so agreement costs no round trip,
//           but no memory of the caller is written;
//   send, receive, release   move chunks through a stream's slots (comm/workspace.h);
//   finish  returns once the caller's tensors may change again.
//
// An envelope also carries the positions of its sender's streams at entry. A call that ended in
// Mismatch may leave unread chunks; the next call's check skips them.
#pragma once

#include <array>
#include <span>
#include <string>

#include "comm/workspace.h"
#include "core/operands.h"
#include "observe/recorder.h"
#include "tandem/codec.h"
#include "tandem/collectives.h"
#include "tandem/tensor.h"

namespace tandem::collectives {

enum class Op : uint8_t { all_reduce, all_gather, reduce_scatter, all_to_all, broadcast };
const char* name_of(Op op);

/// Source of a call's route: its caller, or the tuner, which must have been consulted on all ranks
/// with the same answer (overlap/collectives/cpu.cc).
enum class Route : uint8_t {
  given,
  choosing,      ///< only the arguments are sent: their route is not chosen yet
  uncompressed,  ///< uncompressed elements
  one_shot,      ///< encoded once; in an all-reduce: by each rank, for all
  two_shots,     ///< all-reduce: contributions to their owners, sums to all
};

/// Arguments that must be equal on all ranks.
struct Args {
  Op op;
  DType dtype;
  ReduceOp reduce = ReduceOp::sum;
  uint8_t dims = 0;
  int32_t root = -1;
  std::array<int64_t, kMaxDims> shape{};
  Wire wire;
  Route route = Route::given;

  Args(Op op_, const Tensor& tensor);
  Args() = default;
  bool operator==(const Args&) const = default;
  std::string describe() const;
};

/// Throws InvalidArgument unless `tensor` is contiguous host memory.
void require_contiguous(const char* op, const char* what, const Tensor& tensor);

/// Memory of the caller that a call uses.
struct Uses {
  Operand written = {}, read = {}, residual = {};
};

class Call {
 public:
  /// Throws Aborted after a call that failed half-way: its leftovers would be taken for this
  /// call's.
  Call(Communicator& comm, const Args& args, const Uses& uses);
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  int rank() const { return comm_.rank(); }
  int size() const { return comm_.size(); }
  /// Rank at distance `step` after this one: every rank visits its peers in a different order.
  int peer(int step) const { return (comm_.rank() + step) % comm_.size(); }

  /// Bytes of payload that fit in an envelope.
  size_t small() const { return layout_.small(); }
  /// The first `arguments` bytes of the payload are not counted as sent.
  void enter(int peer, std::span<const std::byte> payload, size_t arguments = 0);
  void enter_all(std::span<const std::byte> payload, size_t arguments = 0);
  /// Counts data that is exchanged without messages.
  void count_sent(size_t bytes) { space_.bytes_sent += bytes; }
  void check();
  /// Ends a call that all ranks know to be invalid, after which they may continue: throws Mismatch.
  [[noreturn]] void refuse(const std::string& message);
  const std::byte* payload(int source) const;

  void send(Stream stream, int peer, const void* source, size_t bytes);
  /// Memory of slot_bytes() to build the next chunk for `peer` in until it is sent. Waits until the
  /// chunk built there before has been read.
  std::byte* staging(Stream stream, int peer);
  /// For chunk `index`, counted from 0 in this call, of the gather stream to all peers.
  std::byte* staging_for_all(uint64_t index);
  size_t slot_bytes() const { return layout_.slot_bytes; }
  const std::byte* receive(Stream stream, int source);
  void release(Stream stream, int source);
  void finish();

  /// Interface for Direct: availability, the number that identifies this call, the gate of a rank's
  /// tensor, and the end of the call (returns once every rank has called it).
  bool one_address_space() const { return space_.reach == Reach::direct; }
  uint64_t number() const { return call_; }
  uint64_t& use_count(int rank) const;
  void leave_all();
  [[noreturn]] void find_left(int peer);

  /// Bytes per chunk for a transfer of `bytes` between two ranks.
  size_t chunk_bytes(size_t bytes) const;

 private:
  const std::byte* envelope(int source) const;
  void wait(int signal, uint64_t epoch, int peer);
  void await_slot(Stream stream, int peer);
  /// Throws AgreedArgument, on all ranks, if one writes memory that another uses, and Aborted if
  /// one of them has left the call: its memory may have been reused by this rank.
  void require_apart(int rank, const std::array<ByteRange, 3>& local, int peer,
                     const std::array<ByteRange, 3>& remote);
  /// Ends a call that all ranks know to be invalid.
  void settle();

  Communicator& comm_;
  Workspace& space_;
  const WorkspaceLayout& layout_;
  const Args args_;
  const char* const name_;
  const uint64_t call_;
  const int errors_;  // errors in flight when the call began
  const CallOnCard on_card_;
  std::array<std::string_view, 3> names_;
  std::array<ByteRange, 3> ranges_;  // written, read, residual; empty in another process
  bool refused_ = false;
  ScopedSpan span_;  // a collective outside an overlapped operator is communication that
                     // computation waits for
};

/// Slice `index` of `total` units cut into slices of `slice`: empty past the end.
struct Slice {
  int64_t begin, count;
};
constexpr Slice slice_of(int64_t total, int64_t slice, int64_t index) {
  const int64_t begin = index * slice < total ? index * slice : total;
  return {begin, total - begin < slice ? total - begin : slice};
}
constexpr int64_t slices_in(int64_t total, int64_t slice) {
  return (total + slice - 1) / slice;
}

}  // namespace tandem::collectives
