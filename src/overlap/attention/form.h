// A form of context-parallel attention: which operands travel, and when. All forms compute the same
// slices of blocks: one rank's queries and one chunk of a rank's keys. They add the results in the
// same order, so all forms give the same bits:
//
//   out, log_sums   local keys: tail, head; then one partial result for each of the ranks r + 1,
//                   r + 2, ..., of their head and tail
//   dq              local keys: tail, head; plus the sum of those of ranks r + 1, r + 2, ..., each
//                   of their head and tail
//   dk, dv          those of local queries, plus the sum of those of ranks r - 1, r - 2, ...
//
// The sums of local and of remote slices are apart, so that a form may compute local slices while
// it waits for operands, and others while its results travel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "overlap/attention/shape.h"
#include "tandem/communicator.h"
#include "tandem/strategy.h"

namespace tandem {

class ContextForm {
 public:
  ContextForm() = default;
  virtual ~ContextForm() = default;
  ContextForm(const ContextForm&) = delete;
  ContextForm& operator=(const ContextForm&) = delete;
  virtual void forward(const ContextForward& call) = 0;
  virtual void backward(const ContextBackward& call) = 0;
};

enum class ContextPass : uint8_t { forward, backward };

/// Row of the list of forms.
struct ContextFormRow {
  const char* name;
  Strategy strategy;
  /// Why the form cannot run; empty if it can.
  std::string (*refusal)(const ContextGrid& grid);
  /// Bytes that a rank allocates for it.
  size_t (*bytes)(const ContextGrid& grid);
  /// Bytes that grid.rank sends in a pass, without signals. The communicator counts the same
  /// (tests).
  int64_t (*sent_bytes)(ContextPass pass, const ContextGrid& grid, int64_t window);
  /// Collective. `rope` may be nullptr and must outlive the form.
  std::unique_ptr<ContextForm> (*make)(Communicator& comm, const ContextGrid& grid,
                                       const RopeTable* rope);
};

/// Forms; `gather`, the first, is serial.
extern const ContextFormRow kGatherForm, kRingForm, kHeadsForm, kQueriesForm;

}  // namespace tandem
