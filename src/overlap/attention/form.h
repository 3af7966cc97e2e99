// A form of context-parallel attention: which operands travel, and when. All forms compute the same
// blocks, of one rank's queries and one rank's keys, and add their results in the same order: that
// of rank r's queries are from the keys of rank r, r + 1, ...; that of rank j's key gradients from
// the queries of rank j, j - 1, .... So all forms give the same bits.
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
