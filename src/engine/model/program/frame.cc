#include "engine/model/program/frame.h"

#include <algorithm>

namespace tandem::program {
namespace {

void run_forward(const Op& op, Frame& frame) {
  op.row->forward ? op.row->forward(op, frame) : frame.run.forward(op, frame);
}

}  // namespace

void set_ranges(const BranchLayout& branch, Values& values) {
  for (size_t i = 0; i < branch.columns.size(); ++i) {
    const ValueId whole = branch.program.values[i].range_of;
    if (whole < 0 || values[size_t(whole)].dims() == 0) continue;
    const auto [begin, count] = branch.columns[i];
    values[i] = columns(values[size_t(whole)], begin, count);
  }
}

void run_norm(Frame& frame) {
  run_forward(frame.branch.program.ops.front(), frame);
}

void run_normalized(Frame& frame) {
  const std::vector<Op>& ops = frame.branch.program.ops;
  for (size_t i = 1; i < ops.size(); ++i) run_forward(ops[i], frame);
}

void run_unsaved(Frame& frame) {
  const BranchProgram& program = frame.branch.program;
  for (const Op& op : program.ops) {
    const bool is_unsaved = std::ranges::any_of(op.out, [&](ValueId value) {
      return program.values[size_t(value)].life == Life::recomputed;
    });
    if (is_unsaved) run_forward(op, frame);
  }
}

void run_backward(BackwardFrame& frame, bool is_split) {
  const std::vector<Op>& ops = frame.branch.program.ops;
  for (size_t i = ops.size(); i-- > 0;) {
    if (i == 0 && !is_split) run_backward_weight(frame);
    const Op& op = ops[i];
    op.row->backward ? op.row->backward(op, frame) : frame.run.backward(op, frame);
  }
}

void run_backward_weight(BackwardFrame& frame) {
  const std::vector<Op>& ops = frame.branch.program.ops;
  for (size_t i = ops.size(); i-- > 0;) {
    if (ops[i].row->is_gemm) frame.run.backward_weight(ops[i], frame);
  }
}

}  // namespace tandem::program
