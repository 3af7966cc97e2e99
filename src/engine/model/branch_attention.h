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
  /// `rotates`: Op::rotates.
  void forward(const ContextForward& call, bool rotates, bool again);
  void backward(const ContextBackward& call, bool rotates);

 private:
  ModelContext& context_;
  /// With and without rotary embedding, if a layer is so; with options.context the second form.
  struct Form {
    std::unique_ptr<Attention> local;
    std::unique_ptr<ContextOperator> with_ranks;
  };
  static Form make_form(const ModelContext& context, const BranchLayout& layout, bool rotates);
  Form& form(bool rotates) { return rotates ? rotating_ : still_; }
  Form rotating_, still_;
};

}  // namespace tandem
