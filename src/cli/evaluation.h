// Shared parts of `tandem eval` and `tandem tune`: a model, text to score, and options.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "cli/devices.h"
#include "cli/result_output.h"
#include "engine/eval/evaluate.h"
#include "engine/model/config.h"
#include "engine/model/side_files.h"
#include "engine/model/weight_files.h"
#include "gemm/coded_weight.h"
#include "tandem/communicator.h"

namespace tandem::cli {

struct EvaluationArguments {
  std::string directory, list, dtype;
  std::string format = "auto";   ///< of the data
  bool needs_text = false;       ///< token files and chats are refused
  std::string weights = "none";  ///< name of a WeightFormat, or none
  std::vector<std::string> data;
  int tp = 0;  ///< 0: not given
  DeviceOptions devices;
  std::string cpu_only;  ///< reason that only CPU ranks evaluate, or empty
  EvaluateOptions options;
};

/// Adds dir, --data, --list, --tp, --seq, --stride, --batch and --dtype.
void add_evaluation_options(CLI::App& command, EvaluationArguments& arguments,
                            const std::string& tp_help);

/// Model on disk, and the files to score.
struct EvaluationInputs {
  const std::string& directory;  ///< contains the model's files
  const ModelConfig& config;
  const WeightFiles& weights;
  const std::vector<std::string>& files;
  const SideFiles& side;

  std::optional<WeightFormat> format = {};  ///< that weights are rounded to

  void load_into(Communicator& tp, Transformer& model) const;
};

/// Reads and checks all inputs, then runs `body` on every rank: by default on `ranks` threads,
/// unless --tp or mpirun sets the number. `agreed`: the command's other options. Throws for user
/// errors before any rank starts, and Mismatch if ranks differ in model, text or options.
void evaluate_on_ranks(EvaluationArguments& arguments, int ranks, const std::string& agreed,
                       const std::function<void(Communicator&, const EvaluationInputs&)>& body);

/// Scores the answers of the files' chats, each chat on its own, and writes the scores of all to
/// standard output or as JSON to `json`. Throws ConfigError for a model without a tokenizer or
/// template, IoError for a line that holds no chat. Collective.
void evaluate_chats(Communicator& comm, const EvaluateOptions& options,
                    const EvaluationInputs& inputs, const ResultOutput& output);

}  // namespace tandem::cli
