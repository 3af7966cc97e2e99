// Loss on held-out data during training, computed as `tandem eval` does: a separate f32 model
// receives a copy of the current parameters, of all pipeline stages. No state of training is
// modified.
//
// Every replica, and every pipeline stage of it, scores an equal part of the windows, and all ranks
// synchronize after each batch. So no wait is longer than a batch, regardless of file sizes, and a
// rank that cannot read its part or is asked to stop ends the validation on all ranks, not the
// training.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/data/config.h"
#include "engine/data/scored_windows.h"
#include "engine/data/tokens/token_source.h"
#include "engine/eval/evaluate.h"
#include "engine/model/transformer.h"
#include "engine/parallel/dims.h"
#include "engine/report/progress.h"
#include "engine/train/config.h"

namespace tandem {

class Validation {
 public:
  /// `groups` must outlive this object. Scores at most train.validate_steps batches or else about
  /// train.validate_bytes of what `source` holds out, spread over all of it. Throws ConfigError if
  /// that is nothing. Collective.
  Validation(const ParallelGroups& groups, const ModelConfig& model, const DataConfig& data,
             const RunConfig& train, const TokenSource& source);

  /// "validation on 256 of 1024 windows of 128 tokens of the held-out text (train.validate_bytes)"
  std::string describe() const;
  /// Whether its loss is per byte, of text files; else per token.
  bool is_text() const { return is_text_; }
  /// Nats per byte, or per token of a stream, the same on every rank; nullopt, with a note of the
  /// reason, if a rank cannot read its part or `*stop` is set on one. `load`: writes the model's
  /// current parameters. `progress`: on rank 0, else nullptr. Collective.
  std::optional<double> loss(int64_t step, const std::function<void(Transformer& model)>& load,
                             const std::atomic<bool>* stop, ProgressLine* progress);

 private:
  std::vector<ScoredWindow> read(int64_t round);
  std::string first_error();  ///< collective

  const ParallelGroups& groups_;
  int num_scorers_, scorer_;  // groups of TP ranks that score windows, and this rank's
  Evaluator evaluator_;
  bool is_text_;
  std::string limit_;  // key
  std::unique_ptr<const ScoredWindows> windows_;
  std::string error_;  // this rank's
};

}  // namespace tandem
