// Attention of a training branch: on all rows of its sequences, or with the rows that
// context-parallel ranks have of them.
#pragma once

#include <memory>

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
  void forward(const ContextForward& call, bool again);
  void backward(const ContextBackward& call);

 private:
  ModelContext& context_;
  std::unique_ptr<Attention> local_;
  std::unique_ptr<ContextOperator> with_ranks_;  ///< with options.context
};

}  // namespace tandem
