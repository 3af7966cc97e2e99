// Loss on held-out text during training, computed as `tandem eval` does: a separate f32 model
// receives a copy of the current parameters. No state of training is modified.
//
// Every replica scores an equal part of the windows, and all ranks synchronize after each batch. So
// no wait is longer than a batch, regardless of file sizes, and a rank that cannot read its part or
// is asked to stop ends the validation on all ranks, not the training.
#pragma once

#include <atomic>
#include <optional>
#include <string>
#include <vector>

#include "engine/data/corpus.h"
#include "engine/eval/evaluate.h"
#include "engine/model/transformer.h"
#include "engine/report/progress.h"
#include "tandem/communicator.h"

namespace tandem {

class Validation {
 public:
  /// Collective over `world`, which contains `tp`, `dp` and, if replicas share experts, `experts`
  /// (else nullptr); all must outlive this object. Scores at most about `max_bytes`, spread over
  /// all held-out text (0: all of it). Throws ConfigError if no file is held out.
  Validation(Communicator& world, Communicator& tp, Communicator& dp, Communicator* experts,
             const ModelConfig& config, const Corpus& corpus, int64_t max_bytes);

  /// "validation on 256 of 1024 windows of 128 tokens of the held-out text (train.validate_bytes)"
  std::string describe() const;
  /// Nats per byte, the same on every rank; nullopt, with a note of the reason, if a rank cannot
  /// read its part or `*stop` is set on one. `progress`: on rank 0, else nullptr. Collective.
  std::optional<double> loss(int64_t step, const Tensor& parameters, const std::atomic<bool>* stop,
                             ProgressLine* progress);

 private:
  std::vector<TextWindow> read(int64_t round);
  std::string first_error();  ///< collective

  Communicator &world_, &tp_, &dp_;
  Evaluator evaluator_;
  TextWindows windows_;
  std::string error_;  // this rank's
};

}  // namespace tandem
