#include "engine/model/program/frame.h"

#include <algorithm>

namespace tandem::program {
namespace {

void run_forward(const Op& op, Frame& frame) {
  if (op.row->finish) return;  // the runner's call of finish_sum
  op.row->forward ? op.row->forward(op, frame) : frame.run.forward(op, frame);
}

void run_op_backward(const Op& op, BackwardFrame& frame) {
  op.row->backward ? op.row->backward(op, frame) : frame.run.backward(op, frame);
}

size_t router_index(const BranchLayout& branch) {
  const std::vector<Op>& ops = branch.program.ops;
  const auto is_router = [](const Op& op) { return op.row == &kRouterBias || op.row == &kRouter; };
  return size_t(std::ranges::find_if(ops, is_router) - ops.begin());
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

void finish_sum(const LayerView& view, const BranchLayout& branch, const Values& values,
                const Tensor& sum) {
  for (const Op& op : branch.program.ops) {
    if (op.row->finish) op.row->finish(op, view, branch, values, sum);
  }
}

void run_norm(Frame& frame) {
  run_forward(frame.branch.program.ops.front(), frame);
}

void run_normalized(Frame& frame) {
  const std::vector<Op>& ops = frame.branch.program.ops;
  for (size_t i = 1; i < ops.size(); ++i) run_forward(ops[i], frame);
}

void run_experts_first(Frame& frame, std::function<void()>& meanwhile) {
  const std::vector<Op>& ops = frame.branch.program.ops;
  const size_t router = router_index(frame.branch);
  meanwhile = [&frame, &ops, router] {
    for (size_t i = 1; i < router; ++i) run_forward(ops[i], frame);
  };
  for (size_t i = router; i < ops.size(); ++i) run_forward(ops[i], frame);
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

void run_backward(BackwardFrame& frame, bool is_split, std::function<void()>* meanwhile) {
  const std::vector<Op>& ops = frame.branch.program.ops;
  const size_t router = meanwhile ? router_index(frame.branch) : 1;
  if (meanwhile) {
    *meanwhile = [&frame, &ops, router] {
      for (size_t i = router; i-- > 1;) run_op_backward(ops[i], frame);
    };
  }
  for (size_t i = ops.size(); i-- > router;) run_op_backward(ops[i], frame);
  if (!is_split) run_backward_weight(frame);
  run_op_backward(ops.front(), frame);
}

void run_backward_weight(BackwardFrame& frame) {
  const std::vector<Op>& ops = frame.branch.program.ops;
  for (size_t i = ops.size(); i-- > 0;) {
    if (ops[i].row->is_gemm) frame.run.backward_weight(ops[i], frame);
  }
}

}  // namespace tandem::program
