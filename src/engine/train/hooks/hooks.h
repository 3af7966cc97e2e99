// The hooks of training steps, by what they do; make_hooks() of trainer.cc states their order.
#pragma once

#include <memory>
#include <vector>

#include "engine/train/run.h"
#include "engine/train/step_hook.h"

namespace tandem::hooks {

using Hook = std::unique_ptr<StepHook>;
using Hooks = std::vector<Hook>;

/// Calls a moment of each, in order.
inline void call(const Hooks& hooks, void (StepHook::*moment)(Step&), Step& step) {
  for (const auto& hook : hooks) ((*hook).*moment)(step);
}

// `run` must outlive the hook. Collective; nullptr if the run has no use for it.
Hook make_trace(Run& run);        ///< trace.json, or the stream of spans in OUT/trace
Hook make_sync(Run& run);         ///< exchanges of learners
Hook make_validation(Run& run);   ///< loss of held-out data
Hook make_records(Run& run);      ///< metrics.jsonl, ledger.jsonl, receipts.json, the progress line
Hook make_checkpoints(Run& run);  ///< snapshots and checkpoints that are due or asked for
Hook make_faults(Run& run);       ///< faults to inject
Hook make_checks(Run& run);       ///< checks of data in memory; what they find may end the run
Hook make_requests(Run& run);     ///< requests to stop or to save, and train.max_seconds
Hook make_notes(Run& run);        ///< memory of activations, gradients of 0
Hook make_phases(Run& run);       ///< this rank's phases, and their comparison with the prediction

}  // namespace tandem::hooks
