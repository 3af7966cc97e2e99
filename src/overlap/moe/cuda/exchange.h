// Communication of a Mixture-of-Experts layer on GPUs, by kernels that store into the receivers'
// memory: notify (expert ids), dispatch (rows) and combine (partial sums of expert results).
//
// A row's slot is its index in its rank's section of the receiver's memory, independent of the
// routing: nothing must be known before it is sent, and no size reaches the host. A call has three
// exchanges, each signalled once by every rank to every other: expert ids, rows, sums. The next
// call reuses the memory without a barrier. A rank sends its expert ids of a call after it has read
// all sums of the previous call, and its sums after it has read all rows; a rank that stores sums
// has waited for the former, and one that stores rows for the latter.
//
// On an emulated link (comm/device/link_pacer.h), kernels compiled for it set their signals when
// the emulated link would have delivered the data.
//
// Each rank sends the identity of its call (CallTag) with its expert ids. If ranks are in different
// calls, they compute nothing, and their hosts throw Mismatch.
//
// A backward pass is a call, too: gradients are dispatched to the experts like rows, and are
// combined as sums without weights, together with the gradients of the weights.
//
// The copy engine may push rows and sums (MoeOnGpus); a push always runs. A rank whose notify has
// failed does not signal what it pushes, and before that marks the call as abandoned with all
// others: one that was so late that it still read rows of the previous call reports that.
//
// In a wire format, rows and sums are messages (wire.h), stored in place of uncompressed ones.
// The format may change from call to call: a rank stores data of a call only after its receiver has
// sent its expert ids of that call, when all of the previous call has been read.
#pragma once

#include "comm/device/gpu_communicator.h"
#include "comm/device/link_pacer.h"
#include "core/cuda/concurrent.h"
#include "overlap/moe/cuda/expert_rows.h"
#include "schedule/moe.h"

namespace tandem::gpu {

/// Max column groups of the combine.
constexpr int kMaxColumnGroups = 4;

/// Layout of a rank's symmetric memory. Expert ids have a section per rank; rows and sums one per
/// other rank, in the order of schedule::moe_source.
struct MoeSpace {
  int64_t tokens = 0, hidden = 0;
  int top_k = 1, world = 1;
  bool trains = false;
  /// Message bytes of a row and of a sum; 0 if these are never encoded.
  size_t row_message = 0, sum_message = 0;
  bool allow_uncompressed =
      false;  ///< encoded kinds may also be sent uncompressed in a forward pass

  constexpr int64_t routings() const { return tokens * top_k; }
  constexpr size_t row_bytes() const { return size_t(hidden) * 2; }
  constexpr size_t source_bytes() const { return size_t(tokens) * row_bytes(); }
  /// Offset of the data that `source` sends to `rank`.
  constexpr size_t rows_at(int rank, int source) const {
    return column_group(rank, source) * source_bytes();
  }
  constexpr size_t row_messages_at(int rank, int source) const {
    return column_group(rank, source) * size_t(tokens) * row_message;
  }
  constexpr size_t sums_at(int rank, int source) const {
    return room(row_message) + column_group(rank, source) * source_bytes();
  }
  constexpr size_t sum_messages_at(int rank, int source) const {
    return room(row_message) + column_group(rank, source) * size_t(tokens) * sum_message;
  }
  constexpr size_t experts_at(int source) const {
    return room(row_message) + room(sum_message) + size_t(source) * size_t(routings()) * 4;
  }
  constexpr size_t weights_at(int source) const {
    return experts_at(world) + experts_at(source) - experts_at(0);
  }
  /// f32, by choice of this rank's rows: weight gradients from the experts of `source`.
  constexpr size_t d_gate_weight_at(int source) const {
    return weights_at(world) + experts_at(source) - experts_at(0);
  }
  /// u64: the call that `source` is in.
  constexpr size_t tag_at(int source) const {
    const size_t begin = trains ? d_gate_weight_at(world) : weights_at(world);
    return (begin + 7) / 8 * 8 + size_t(source) * sizeof(uint64_t);
  }
  constexpr size_t bytes() const { return tag_at(world); }

  static constexpr int routings_signal(int source) { return source; }
  static constexpr int rows_signal(int source) { return kMaxGpus + source; }
  static constexpr int sums_signal(int column_group, int source) {
    return (2 + column_group) * kMaxGpus + source;
  }
  /// Local signal: the rows of `source` have been decoded.
  static constexpr int decoded_signal(int source) {
    return (2 + kMaxColumnGroups) * kMaxGpus + source;
  }
  /// Signal: `source` has abandoned a call, and may push rows that this rank does not expect.
  static constexpr int abandoned_signal(int source) {
    return (3 + kMaxColumnGroups) * kMaxGpus + source;
  }
  static constexpr int kSignals = (4 + kMaxColumnGroups) * kMaxGpus;

 private:
  /// Index of `source` among the ranks that send to `rank`.
  constexpr size_t column_group(int rank, int source) const {
    return size_t((rank - source + world) % world - 1);
  }
  /// Bytes for all other ranks' rows or sums; an encoded one has `message` bytes.
  constexpr size_t room(size_t message) const {
    const bool uncompressed = message == 0 || trains || allow_uncompressed;
    const size_t largest = uncompressed && row_bytes() > message ? row_bytes() : message;
    return size_t(world - 1) * size_t(tokens) * largest;
  }
};

/// In device memory, initially zero. Counts are 0 between calls.
struct MoeState {
  CallCounter calls;
  unsigned announced = 0;
  /// Rows of this call to be sent, counted once per destination: during notify, and after it.
  unsigned counted_rows = 0, leaving_rows = 0;
  /// Blocks that have begun to send concurrently with the first GEMM; blocks of the permutation
  /// that are done.
  unsigned senders = 0, permuted = 0;
  unsigned sent_rows[kMaxGpus] = {};
  unsigned sent_sums[kMaxColumnGroups][kMaxGpus] = {};
  unsigned decoded_rows[kMaxGpus] = {};
  /// Signals of pushes: the last call that all ranks agreed on, or whose sums were added.
  uint64_t agreed = 0, added = 0;
};

/// Kernel parameters of a call.
struct MoeCall {
  PeerTable table;
  Deadline deadline;
  MoeSpace space;
  schedule::MoeGrid grid;
  MoeState* state = nullptr;
  uint8_t* token_in_rank = nullptr;  ///< [tokens]: a bit per rank with experts of the row
  DType dtype = DType::bf16;
  const int32_t* experts = nullptr;  ///< [rows, top_k], the caller's
  const float* weights = nullptr;
  int64_t rows = 0;
  const int32_t* position = nullptr;  ///< [world][tokens, top_k], from MoePermutation
  const void* results = nullptr;      ///< [padded rows, hidden]
  uint64_t layer = 0;                 ///< equal on all ranks
  uint64_t* dropped = nullptr;        ///< counter of dropped routings
  // Saved for a backward pass: expert ids and weights, without dropped routings, and the call's
  // number.
  int32_t* saved_experts = nullptr;  ///< [tokens, top_k]
  float* saved_weights = nullptr;
  uint64_t* saved_call = nullptr;  ///< also in the backward pass, which reads it
  // Backward pass, which uses the saved routing:
  bool backward = false;
  const float* d_gate_weight =
      nullptr;                ///< [world][tokens, top_k], gradients of the weights, by choice
  float* dweights = nullptr;  ///< [rows, top_k], written
  /// If set, sums are stored here, [other ranks by step][tokens, hidden], and not signalled.
  std::byte* staged_sums = nullptr;
  bool peers_may_push = false;      ///< in this call or in others of the layer
  LinkPacer* link_pacer = nullptr;  ///< pacer of an emulated link between several ranks
  /// Counter of send blocks that have begun, for the permutation (MoePermutation::senders).
  unsigned* senders = nullptr;
};

/// Notify: sends every rank the destinations of this rank's rows, and waits for those of all ranks.
/// A routing that is not a valid expert, or a duplicate within its row, or whose weight is not
/// finite, is counted and dropped; -1 is no routing. Abandons the call if a rank is in another one.
void launch_notify(const MoeCall& call, cudaStream_t stream);
/// Dispatch: sends every row of x to each other rank that has experts of it.
void launch_send_rows(const MoeCall& call, const void* x, int blocks, cudaStream_t stream);
/// Dispatch of the rows' messages, [rows] of space.row_message bytes.
void launch_send_messages(const MoeCall& call, const std::byte* messages, int blocks,
                          cudaStream_t stream);
/// launch_send_rows by `senders` of the blocks, which then join the others in permuting rows for
/// the next GEMM, which runs concurrently (launch_overlapped_gather).
void launch_send_and_gather(const MoeCall& call, const void* x, int senders,
                            const GroupedTable& table, const MoeGather& gather, uint32_t* ready,
                            const ConcurrentBlocks& blocks, cudaStream_t stream);
/// Combine, sending half: sums over this rank's experts for the other ranks' rows, `columns` of
/// them, rounded.
void launch_send_sums(const MoeCall& call, schedule::Range columns, int column_group,
                      const ConcurrentBlocks& blocks, cudaStream_t stream);
/// Combine, receiving half: out = sum over ranks, in rank order, in f32; this rank's term is not
/// rounded. Waits for the others' `column_groups` column groups, and ends the call.
void launch_sum_ranks(const MoeCall& call, const Tensor& out, int column_groups,
                      cudaStream_t stream);

}  // namespace tandem::gpu
