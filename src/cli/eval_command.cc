#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "cli/commands.h"
#include "cli/evaluation.h"
#include "cli/result_output.h"
#include "cli/text_model.h"
#include "core/system/console.h"
#include "core/system/json.h"
#include "core/system/log.h"
#include "core/system/output.h"
#include "engine/config/data_format.h"
#include "engine/plan/codecs/codec_search.h"
#include "engine/plan/codecs/codec_sweep.h"
#include "engine/report/progress.h"
#include "tandem/error.h"

namespace tandem::cli {
namespace {

struct EvalArguments {
  ResultOutput output;
  std::string codec = "none", sweep;
  std::vector<std::string> sweep_sites;  ///< empty: all sites of the model
  EvaluationArguments evaluation;
};

void print(const FileScore& total, size_t files) {
  if (total.bytes == 0 && total.tokens == 0)
    throw InvalidArgument("--data: the files hold no bytes: expected some text");
  if (total.bytes == 0) {
    fmt::print("{:.4f} nats per token, perplexity {:.4f} over {} tokens in {} files\n",
               total.nats_per_token(), total.perplexity(), total.tokens, files);
    return;
  }
  const bool is_bytes = total.tokens == total.bytes;
  fmt::print(
      "{:.4f} bits per byte{} over {} bytes in {} files\n", total.bits_per_byte(),
      is_bytes ? ""
               : fmt::format(", perplexity {:.4f} of {} tokens,", total.perplexity(), total.tokens),
      total.bytes, files);
}

/// Throws on every rank, as all have the same score.
void require_finite(const FileScore& score) {
  if (std::isfinite(score.nats)) return;
  const std::string figure = score.bytes > 0
                                 ? fmt::format("{} bits per byte", score.bits_per_byte())
                                 : fmt::format("{} nats per token", score.nats_per_token());
  throw InvalidArgument(fmt::format(
      "{}: {}: expected a finite number (the model's values leave the range of --dtype)",
      score.path, figure));
}

/// Token files have no bytes.
void add_figures(const FileScore& score, nlohmann::ordered_json& to) {
  if (score.bytes > 0 || score.tokens == 0) {
    to["bytes"] = score.bytes;
    to["bits_per_byte"] = score.bits_per_byte();
  }
  to["tokens"] = score.tokens;
  to["nats_per_token"] = score.nats_per_token();
  to["perplexity"] = score.perplexity();
}

void print_json(const std::vector<FileScore>& scores, const ResultOutput& output) {
  FileScore total;
  nlohmann::ordered_json files = nlohmann::ordered_json::array();
  for (const FileScore& score : scores) {
    total.bytes += score.bytes;
    total.nats += score.nats;
    total.tokens += score.tokens;
    nlohmann::ordered_json file{{"path", score.path}};
    add_figures(score, file);
    files.push_back(std::move(file));
  }
  if (output.shows_text()) print(total, scores.size());
  nlohmann::ordered_json root;
  add_figures(total, root);
  root["nats"] = total.nats;
  root["files"] = files;
  output.write_json(dump_json(root, 1) + "\n");
}

/// Progress line, shown only after the first second.
class EvalProgress {
 public:
  explicit EvalProgress(const std::vector<std::string>& files) {
    for (const std::string& file : files) {
      std::error_code gone;  // reported by the later read
      const auto bytes = std::filesystem::file_size(file, gone);
      if (!gone) progress_.steps += int64_t(bytes);
    }
    progress_.unit = "byte";
    progress_.loss = std::nan("");
  }
  void scored(int64_t bytes) {
    progress_.step += bytes;
    const std::chrono::duration<double> took = Clock::now() - begin_;
    if (took.count() < 1) return;
    if (!line_) line_.emplace();
    progress_.tokens_per_s = double(progress_.step) / took.count();
    line_->update(progress_);
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point begin_ = Clock::now();
  RunProgress progress_;
  std::optional<ProgressLine> line_;
};

/// Evaluates every format on the whole text, sequentially. Collective.
void sweep(Communicator& comm, const EvalArguments& arguments, const EvaluationInputs& inputs) {
  EvaluateOptions options = arguments.evaluation.options;
  options.overlap.strategy = Strategy::serial;  // all strategies give the same bits
  Sweep all{{},
            inputs.config,
            arguments.sweep_sites.empty() ? site_names(inputs.config) : arguments.sweep_sites,
            comm.size(),
            options.dtype,
            0,
            {}};
  for (const Wire& wire : sweep_wires()) {
    options.codec = codec_at(inputs.config, all.sites, wire);
    Evaluator evaluator(comm, inputs.config, options);
    inputs.load_into(comm, evaluator.model());
    const FileScore total = evaluator.total(inputs.files);
    require_finite(total);
    all.bytes = total.bytes;
    all.points.push_back({wire, total.bits_per_byte()});
    if (comm.rank() == 0) log_message(LogLevel::info, "codec " + wire.describe());
  }
  if (comm.rank() != 0) return;
  all.training = training_record(inputs.directory, inputs.weights.header_hash());
  if (!all.training) {
    log_message(LogLevel::warn,
                arguments.evaluation.directory +
                    ": no checkpoint of these weights next to it: how it was trained is not known");
  }
  write_output(arguments.sweep + ".json", all.json());
  write_output(arguments.sweep + ".svg", all.svg());
  fmt::print("{}", all.table());
}

void check_codec(const EvalArguments& arguments, const ModelConfig& config, int ranks) {
  arguments.evaluation.options.codec.require_used(config, ranks);
  if (!arguments.sweep_sites.empty() && arguments.sweep.empty()) {
    throw InvalidArgument("--sweep-sites without --codec-sweep: expected both");
  }
  codec_at(config, arguments.sweep_sites, {});
  if (ranks > 1 || arguments.sweep.empty()) return;
  throw InvalidArgument(
      "--codec-sweep with 1 rank, which sends nothing: expected --tp of 2 or more");
}

void evaluate(Communicator& comm, const EvalArguments& arguments, const EvaluationInputs& inputs) {
  check_codec(arguments, inputs.config, comm.size());
  if (!arguments.sweep.empty()) return sweep(comm, arguments, inputs);
  if (has_chats(arguments.evaluation.options.format)) {
    return evaluate_chats(comm, arguments.evaluation.options, inputs, arguments.output);
  }
  Evaluator evaluator(comm, inputs.config, arguments.evaluation.options);
  inputs.load_into(comm, evaluator.model());
  std::optional<EvalProgress> progress;
  if (comm.rank() == 0) {
    progress.emplace(inputs.files);
    evaluator.on_batch([&](int64_t bytes) { progress->scored(bytes); });
  }
  if (!arguments.output.is_given()) {
    const FileScore total = evaluator.total(inputs.files);
    require_finite(total);
    progress.reset();
    if (comm.rank() == 0) print(total, inputs.files.size());
    return;
  }
  std::vector<FileScore> scores;
  for (const std::string& file : inputs.files) {
    scores.push_back(evaluator.score(file));
    require_finite(scores.back());
  }
  progress.reset();
  if (comm.rank() == 0) print_json(scores, arguments.output);
}

void run(EvalArguments arguments) {
  arguments.output.check();
  now_doing("evaluating " + arguments.evaluation.directory);
  EvaluationArguments& evaluation = arguments.evaluation;
  evaluation.needs_text = !arguments.sweep.empty();
  if (!arguments.sweep.empty()) {
    evaluation.cpu_only = "--codec-sweep";
  } else if (parse_weight_format(evaluation.weights)) {
    evaluation.cpu_only = "--weights " + evaluation.weights;
  }
  EvaluateOptions& options = evaluation.options;
  options.codec = CodecPolicy::parse(arguments.codec);
  const std::string agreed = fmt::format(
      "--json {} --codec {} --codec-sweep {} --sweep-sites {}", arguments.output.is_given(),
      options.codec.describe(), !arguments.sweep.empty(), fmt::join(arguments.sweep_sites, ","));
  evaluate_on_ranks(arguments.evaluation, 1, agreed,
                    [&](Communicator& comm, const EvaluationInputs& inputs) {
                      evaluate(comm, arguments, inputs);
                    });
}

}  // namespace

void add_eval(CLI::App& app) {
  auto* command =
      app.add_subcommand("eval", "Evaluate a trained model: bits per byte of text, nats of chats");
  auto arguments = std::make_shared<EvalArguments>();
  add_evaluation_options(*command, arguments->evaluation,
                         "Tensor parallel ranks (default: 1; under mpirun all)");
  add_weights_option(*command, arguments->evaluation.weights);
  add_device_options(*command, arguments->evaluation.devices);
  command
      ->add_option("--codec", arguments->codec,
                   "Wire format of sums over ranks (int8), or one per site: attention, mlp, "
                   "experts, embeddings (mlp=int4:g32,embeddings=int8)")
      ->capture_default_str();
  command->add_option(
      "--codec-sweep", arguments->sweep,
      "Score every format at every site: print a table, write PREFIX.json and PREFIX.svg");
  command
      ->add_option(
          "--sweep-sites", arguments->sweep_sites,
          "Score formats at these sites only, such as attention,mlp (default: all of the model)")
      ->delimiter(',');
  add_json_option(*command, arguments->output, "the result with every file", "it");
  command->footer(
      "\nExamples:\n"
      "  tandem eval out/tiny --data include                one figure for all files\n"
      "  tandem train configs/tiny.toml --out out/part --set data.val_fraction=0.3\n"
      "  tandem eval out/part --list out/part/heldout.txt --json scores.json\n"
      "  tandem eval out/tiny/checkpoints/step-00000050 --data include --tp 2\n"
      "  tandem eval out/tiny --data include --tp 2 --codec int4:g32   what the codec costs\n"
      "  tandem eval out/tiny --data include --tp 2 --codec-sweep codecs");
  command->callback([arguments] { run(*arguments); });
}

}  // namespace tandem::cli
