// Job of `tandem finetune`: what a model and files of chats or text need, unless the user says
// more.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "engine/config/config.h"

namespace tandem {

struct FinetuneRequest {
  std::string model;                    ///< folder, as for train.init
  std::vector<std::string> data;        ///< as data.paths; relative to the current folder
  std::vector<std::string> validation;  ///< empty: some of `data` are held out
  std::optional<double> epochs;         ///< at most, over what is not held out; default: 3
  std::vector<std::string> overrides;   ///< "table.key=value", over all that is chosen
};

/// Opens model and data, once for each share that is tried as held-out data, and chooses:
/// - train.seq: chats fit whole, the next power of two from 64; other data min(1024, the model's);
/// - data.val_fraction 5 %, more of few documents until there is one, none of fewer than 10;
/// - train.batch: eight steps an epoch or more, of at most 16,384 tokens each, or a sequence for
/// each
///   data-parallel rank if that is more; in parts of at most 8,192 tokens, or a sequence, a rank;
/// - train.steps from `epochs`; validation twice an epoch, train.early_stop 3, final/ with the
///   lowest loss; checkpoints only where the run ends;
/// - optimizer.lr 2e-5 for 1e9 parameters and more, otherwise 2e-5 · √(1e9 / parameters), at most
///   1e-3; min_lr a tenth; final/ in bf16 if the model's config.json says that of its weights.
/// `set_layout` writes the command line's over the job's. `notes` receives a line for each choice
/// that the user should know of. Throws ConfigError (also for a stream without train.steps),
/// IoError or InvalidArgument for a model or data that cannot be read.
TrainConfig make_finetune_config(const FinetuneRequest& request,
                                 const std::function<void(ParallelConfig&)>& set_layout,
                                 std::vector<std::string>* notes);

/// Job of the run that `out` holds, with the request's overrides. Throws ConfigError for another
/// model, other data or other validation data than the run's. The run keeps its steps: given epochs
/// that would be others are a note.
TrainConfig resume_finetune_config(const FinetuneRequest& request, const std::string& out,
                                   std::vector<std::string>* notes);

}  // namespace tandem
