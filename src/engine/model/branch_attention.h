// Attention of a training branch: on all rows of its sequences, or with the rows that
// context-parallel ranks have of them.
#pragma once

#include <array>
#include <memory>

#include "engine/model/program/program.h"
#include "kernels/attention/attention.h"
#include "overlap/attention/operator.h"

namespace tandem {

struct BranchLayout;
struct ModelContext;

class BranchAttention {
 public:
  /// Collective over options.context, if there is one.
  BranchAttention(ModelContext& context, const BranchLayout& layout);

  /// May rotate q and k in a branch's `hidden`: only backward reads them afterwards, as they were
  /// left. `again`: recomputes what the pass before has written, with the same bits.
  /// `op`: the branch's attention.
  void forward(const ContextForward& call, const BranchLayout& branch, const program::Op& op,
               bool again);
  void backward(const ContextBackward& call, const BranchLayout& branch, const program::Op& op);

 private:
  ModelContext& context_;
  /// Form of one rotation, if a layer has it: the second one with options.context.
  struct Form {
    std::unique_ptr<Attention> local;
    std::unique_ptr<ContextOperator> with_ranks;
  };
  static Form make_form(const ModelContext& context, const BranchLayout& layout,
                        program::Rotation rotation);
  void run(const ContextForward& call, program::Rotation rotation, bool again);
  void run_backward(const ContextBackward& call, program::Rotation rotation);
  /// f32, or without dimensions if it has none.
  Tensor sinks(const BranchLayout& branch, const program::Op& op) const;
  Form& form(program::Rotation rotation) { return forms_[size_t(rotation)]; }
  std::array<Form, program::kNumRotations> forms_;
};

}  // namespace tandem
