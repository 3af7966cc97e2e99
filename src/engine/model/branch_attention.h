// Attention of a training branch: on all rows of its sequences, or with the rows that
// context-parallel ranks have of them.
#pragma once

#include <memory>

#include "kernels/attention/attention.h"
#include "overlap/attention/operator.h"

namespace tandem {

struct BranchLayout;
struct ModelContext;
namespace program {
struct Op;
}

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
  /// With and without rotary embedding, if a layer is so; with options.context the second form.
  struct Form {
    std::unique_ptr<Attention> local;
    std::unique_ptr<ContextOperator> with_ranks;
  };
  static Form make_form(const ModelContext& context, const BranchLayout& layout, bool rotates);
  void run(const ContextForward& call, bool rotates, bool again);
  void run_backward(const ContextBackward& call, bool rotates);
  /// f32, or without dimensions if it has none.
  Tensor sinks(const BranchLayout& branch, const program::Op& op) const;
  Form& form(bool rotates) { return rotates ? rotating_ : still_; }
  Form rotating_, still_;
};

}  // namespace tandem
