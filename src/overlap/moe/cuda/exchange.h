// What the ranks of a Mixture-of-Experts layer on GPUs send each other, by kernels that store into
// the receivers' memory: where rows go, the rows, and partial sums of what experts made of them.
//
// A row's slot is its own number in the part that its rank has of the receiver's memory, whatever
// was routed: nothing has to be known before it leaves, and no size reaches the host. A call has
// three exchanges, each signalled once by every rank to every other: choices, rows, sums. Memory is
// used again by the next call without a barrier. A rank sends its choices of a call when it has
// read all sums of the one before, and its sums when it has read all rows; whoever stores sums has
// waited for the former, and whoever stores rows for the latter.
//
// On an emulated link (comm/device/line.h) kernels compiled for it raise their signals when the
// rank's line would have delivered what they tell of.
//
// Beside its choices a rank tells in which call it is (CallTag). Ranks in different calls compute
// nothing, and their hosts throw Mismatch.
//
// A backward pass is a call, too: gradients travel to the experts as rows do, and come back as sums
// without weights, with the gradients of the weights beside them.
//
// In a wire format rows and sums are messages (wire.h), which lie where plain ones would. Which
// of the two a call sends may change from call to call: nobody stores what a call sends before its
// receiver has told its choices of that call, and then all of the call before has been read.
#pragma once

#include "comm/device/gpu_communicator.h"
#include "comm/device/line.h"
#include "core/cuda/beside.h"
#include "overlap/moe/cuda/expert_rows.h"
#include "schedule/moe.h"

namespace tandem::gpu {

/// Most groups of columns in which sums leave.
constexpr int kMostMoeParts = 4;

/// One rank's symmetric memory. Choices are a part of each rank; rows and sums are a part of every
/// other one, in the order of schedule::moe_source.
struct MoeSpace {
  int64_t tokens = 0, hidden = 0;
  int top_k = 1, world = 1;
  bool trains = false;
  /// Bytes of the message of a row and of a sum; 0: these are never encoded.
  size_t row_message = 0, sum_message = 0;
  bool or_plain = false;  ///< what may be encoded may also travel plain in a forward pass

  constexpr int64_t choices() const { return tokens * top_k; }
  constexpr size_t row_bytes() const { return size_t(hidden) * 2; }
  constexpr size_t part_bytes() const { return size_t(tokens) * row_bytes(); }
  /// Of what `source` sends to `rank`.
  constexpr size_t rows_at(int rank, int source) const { return part(rank, source) * part_bytes(); }
  constexpr size_t row_messages_at(int rank, int source) const {
    return part(rank, source) * size_t(tokens) * row_message;
  }
  constexpr size_t sums_at(int rank, int source) const {
    return room(row_message) + part(rank, source) * part_bytes();
  }
  constexpr size_t sum_messages_at(int rank, int source) const {
    return room(row_message) + part(rank, source) * size_t(tokens) * sum_message;
  }
  constexpr size_t experts_at(int source) const {
    return room(row_message) + room(sum_message) + size_t(source) * size_t(choices()) * 4;
  }
  constexpr size_t weights_at(int source) const {
    return experts_at(world) + experts_at(source) - experts_at(0);
  }
  /// f32, by choice of this rank's rows: gradients of their weights, of `source`'s experts.
  constexpr size_t dots_at(int source) const {
    return weights_at(world) + experts_at(source) - experts_at(0);
  }
  /// u64: in which call `source` is.
  constexpr size_t tag_at(int source) const {
    const size_t begin = trains ? dots_at(world) : weights_at(world);
    return (begin + 7) / 8 * 8 + size_t(source) * sizeof(uint64_t);
  }
  constexpr size_t bytes() const { return tag_at(world); }

  static constexpr int choices_signal(int source) { return source; }
  static constexpr int rows_signal(int source) { return kMaxGpus + source; }
  static constexpr int sums_signal(int part, int source) { return (2 + part) * kMaxGpus + source; }
  /// A rank's own: that the rows of `source` have been decoded.
  static constexpr int decoded_signal(int source) {
    return (2 + kMostMoeParts) * kMaxGpus + source;
  }
  static constexpr int kSignals = (3 + kMostMoeParts) * kMaxGpus;

 private:
  /// The number of `source` among those that send to `rank`.
  constexpr size_t part(int rank, int source) const {
    return size_t((rank - source + world) % world - 1);
  }
  /// For all other ranks' rows or sums, of which one that is encoded has `message` bytes.
  constexpr size_t room(size_t message) const {
    const bool plain = message == 0 || trains || or_plain;
    const size_t largest = plain && row_bytes() > message ? row_bytes() : message;
    return size_t(world - 1) * size_t(tokens) * largest;
  }
};

/// In device memory, zero at first. Counts are 0 between calls.
struct MoeState {
  CallCounter calls;
  unsigned announced = 0;
  /// Rows of this call that leave, counted for each rank that they go to; while it is announced,
  /// and from then on.
  unsigned counted_rows = 0, leaving_rows = 0;
  /// Blocks that have begun to send beside the first product, and of the placing those that are
  /// done.
  unsigned senders = 0, placed = 0;
  unsigned sent_rows[kMaxGpus] = {};
  unsigned sent_sums[kMostMoeParts][kMaxGpus] = {};
  unsigned decoded_rows[kMaxGpus] = {};
};

/// A call, as its kernels take it.
struct MoeCall {
  PeerTable table;
  Watch watch;
  MoeSpace space;
  schedule::MoeGrid grid;
  MoeState* state = nullptr;
  uint8_t* goes = nullptr;  ///< [tokens]: by bit, which ranks have experts of a row
  DType dtype = DType::bf16;
  const int32_t* experts = nullptr;  ///< [rows, top_k], the caller's
  const float* weights = nullptr;
  int64_t rows = 0;
  const int32_t* place = nullptr;  ///< [world][tokens, top_k], of MoePlacing
  const void* results = nullptr;   ///< [padded rows, hidden]
  uint64_t layer = 0;              ///< the same on all ranks
  uint64_t* refused = nullptr;     ///< counted up by choices that are none
  // Of a call that a backward pass follows: where its choices and weights are kept, none that were
  // refused among them, and its number.
  int32_t* kept_experts = nullptr;  ///< [tokens, top_k]
  float* kept_weights = nullptr;
  uint64_t* kept_call = nullptr;  ///< also of the backward pass, which reads it
  // Of a backward pass, whose routing is what was kept:
  bool backward = false;
  const float* dots = nullptr;  ///< [world][tokens, top_k], gradients of the weights, by choice
  float* dweights = nullptr;    ///< [rows, top_k], written
  Line* line = nullptr;         ///< of an emulated link between several ranks
  /// What sends rows counts its blocks here as they begin, for the placing (MoePlacing::senders).
  unsigned* senders = nullptr;
};

/// Tells every rank where this one's rows go, and waits until all have. A choice that is no expert,
/// or that the row has already, or whose weight is not finite, counts as refused and as none. Gives
/// up where a rank is in another call.
void launch_announce(const MoeCall& call, cudaStream_t stream);
/// Every row of x to each other rank that has experts of it.
void launch_send_rows(const MoeCall& call, const void* x, int blocks, cudaStream_t stream);
/// The same of their messages, [rows] of space.row_message bytes.
void launch_send_messages(const MoeCall& call, const std::byte* messages, int blocks,
                          cudaStream_t stream);
/// launch_send_rows by `senders` of some blocks, which then join the others: those put rows into
/// place for the product behind, which runs beside them (launch_gather_beside).
void launch_send_and_gather(const MoeCall& call, const void* x, int senders,
                            const GroupedTable& table, const MoeGather& gather, uint32_t* ready,
                            const BesideBlocks& blocks, cudaStream_t stream);
/// Sums over this rank's experts for the other ranks' rows, `columns` of them, rounded.
void launch_send_sums(const MoeCall& call, schedule::Range columns, int part,
                      const BesideBlocks& blocks, cudaStream_t stream);
/// out = sum over ranks, in their order, in f32; this rank's own term is not rounded. Waits for the
/// others' `parts`, and ends the call.
void launch_sum_ranks(const MoeCall& call, const Tensor& out, int parts, cudaStream_t stream);

}  // namespace tandem::gpu
