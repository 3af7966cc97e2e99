// A pass of a Mixture-of-Experts layer as data: its steps, in the order in which a rank launches
// them. CPU ranks and GPU ranks run lists of the same steps: each has one launch per step, and
// enqueueing is a loop. On GPU ranks a lane is a stream, and an event orders two lanes; CPU ranks
// run the list from its first step to its last, while messages are in flight.
//
// A pass has two halves, as the layer has two exchanges: rows to experts and their first GEMM, then
// the second GEMM and the sums back. A backward pass swaps their roles: gradients of results to
// experts, then gradients of rows back, and the gradients of the weights.
//
// Invariants (tested for every form): a step comes after the steps whose results it reads, in its
// lane or through events; what runs does not depend on the form, only when and on which rows.
#pragma once

#include <cstdint>
#include <vector>

namespace tandem::schedule {

enum class MoeStep : uint8_t {
  notify,           ///< tells all ranks the destinations of this rank's rows
  encode_rows,      ///< to messages of a wire format
  send_rows,        ///< each row once to each other rank with experts of it
  push_rows,        ///< all rows to each other rank, by the copy engine
  decode_rows,      ///< arrived messages
  permute,          ///< positions of all ranks' rows, by expert
  gather,           ///< rows to their positions
  send_and_gather,  ///< both, by one kernel
  first,            ///< GEMM, on CPU ranks with the gate
  swiglu,           ///< gate of a GEMM that saves its input
  second,           ///< GEMM
  d_act,            ///< GEMM through the second weight, on CPU ranks with the gate
  gate,             ///< gradient through the gate
  dx,               ///< GEMM through the first weight
  send_sums,        ///< each row's sum over local experts to its rank
  stage_sums,       ///< the same into this rank's memory
  push_sums,        ///< what stage_sums has written, by the copy engine
  dw_in,            ///< gradient of the first weight
  dw_out,           ///< gradient of the second weight
  sum_ranks,        ///< sum over ranks, in rank order
};
constexpr int kMoeSteps = int(MoeStep::sum_ranks) + 1;

enum class Lane : uint8_t { main, side };

/// Point of a lane that steps of another lane wait for.
using PassEvent = int8_t;
constexpr PassEvent kNoEvent = -1, kNotified = 0, kRowsSent = 1, kSumsSent = 2;
/// A column group's products.
constexpr PassEvent computed_event(int group) {
  return PassEvent(3 + group);
}

/// Rows of a step: those of this rank's tokens, those of other ranks' tokens, or both.
enum class RowsFrom : uint8_t { all, local, remote };

struct PassStep {
  MoeStep step = MoeStep::notify;
  Lane lane = Lane::main;
  PassEvent before = kNoEvent;  ///< awaited by the lane before the step
  PassEvent after = kNoEvent;   ///< recorded in the lane after the step
  RowsFrom rows = RowsFrom::all;
  int chunk = 0;  ///< chunk of remote rows (gather, first, d_act) or of columns (the others)
  bool operator==(const PassStep&) const = default;
};
using MoePass = std::vector<PassStep>;

/// Exchange of rows in a pass.
enum class RowExchange : uint8_t {
  serial,         ///< rows have been sent before the GEMM begins
  overlapped,     ///< sent while local rows are multiplied
  while_sorting,  ///< sent by the kernel that sorts rows concurrently with the GEMM
  pushed,         ///< by the copy engine
};
/// Return of sums.
enum class SumExchange : uint8_t {
  serial,         ///< one step after the GEMM
  under_weights,  ///< serial, but the weights' gradients precede the sum over ranks
  by_columns,     ///< one column group is sent while the next is multiplied
  local_last,     ///< remote rows, also by column groups, are sent while local rows are multiplied
  /// By the copy engine, while local rows are multiplied, or gradients of weights are computed.
  pushed,
};

struct MoePassForm {
  bool sends = true;             ///< there are several ranks
  bool encodes_rows = false;     ///< sent in a wire format that a step encodes
  bool gathers_in_gemm = false;  ///< the first GEMM reads rows where they arrive
  bool saves_gathered = false;   ///< which a step then gathers for the backward pass
  bool has_gate_step = false;    ///< the gate is a step of its own
  RowExchange rows = RowExchange::serial;
  int row_chunks = 0;  ///< chunks of remote rows; 0: the GEMM's tiles wait for theirs
  SumExchange sums = SumExchange::serial;
  int column_groups = 1;
  /// Backward, rows overlapped, sums local_last: gradients of local rows are computed while others'
  /// arrive, not while sums leave.
  bool local_dx_first = false;
};

/// First half of a forward pass.
MoePass make_dispatch(const MoePassForm& form);
/// Second half of a forward pass.
MoePass make_combine(const MoePassForm& form);
MoePass make_forward(const MoePassForm& form);
/// First half of a backward pass.
MoePass make_dispatch_backward(const MoePassForm& form);
/// Second half of a backward pass, with the gradients of the weights.
MoePass make_combine_backward(const MoePassForm& form);
MoePass make_backward(const MoePassForm& form);

}  // namespace tandem::schedule
