// What `tandem eval` and `tandem tune` share: a model, text that it scores, and how.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <string>
#include <vector>

#include "core/safetensors.h"
#include "engine/eval/evaluate.h"
#include "engine/model/config.h"
#include "tandem/communicator.h"

namespace tandem::cli {

struct EvaluationArguments {
  std::string directory, list, dtype = "f32";
  std::vector<std::string> data;
  int tp = 0;  ///< 0: not given
  EvaluateOptions options;
};

/// dir, --data, --list, --tp, --seq, --stride, --batch and --dtype.
void add_evaluation_options(CLI::App& command, EvaluationArguments& arguments,
                            const std::string& tp_help);

/// A model on disk, and the files to score.
struct EvaluationInputs {
  const std::string& directory;  ///< of the model's files
  const ModelConfig& config;
  const SafetensorsFile& weights;
  const std::vector<std::string>& files;

  void load_into(Transformer& model) const;
};

/// Reads and checks all, and runs `body` on every rank: `ranks` threads where --tp and mpirun say
/// nothing else. `agreed`: the command's other options. Throws before any rank starts for what a
/// user can get wrong, and Mismatch where ranks differ in model, text or options.
void evaluate_on_ranks(EvaluationArguments& arguments, int ranks, const std::string& agreed,
                       const std::function<void(Communicator&, const EvaluationInputs&)>& body);

}  // namespace tandem::cli
