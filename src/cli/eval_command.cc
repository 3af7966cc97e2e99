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

#include "cli/codec_sweep.h"
#include "cli/commands.h"
#include "cli/output.h"
#include "cli/usage.h"
#include "core/files.h"
#include "core/log.h"
#include "core/machine.h"
#include "core/output.h"
#include "core/safetensors.h"
#include "gemm/gemm.h"
#include "model/pretrained.h"
#include "observe/progress.h"
#include "tandem/error.h"
#include "train/corpus.h"
#include "train/evaluate.h"

namespace tandem::cli {
namespace {

struct EvalArguments {
  std::string directory, list, json, dtype = "f32", codec = "none", sweep;
  std::vector<std::string> data;
  int tp = 0;
  EvaluateOptions options;
};

std::vector<std::string> files_of(const EvalArguments& arguments) {
  if (arguments.data.empty() && arguments.list.empty()) {
    throw InvalidArgument("nothing to evaluate: expected --data PATH or --list FILE");
  }
  std::vector<std::string> paths = arguments.data;
  if (!arguments.list.empty()) {
    for (std::string& path : paths_of_list(read_file(arguments.list, Source::any))) {
      paths.push_back(std::move(path));
    }
  }
  if (paths.empty()) {
    throw InvalidArgument(fmt::format(
        "--list {}: names no files: expected a path per line (a run holds files out with "
        "data.heldout above 0)",
        arguments.list));
  }
  const FoundFiles found = find_files(paths);
  if (speaks() && !found.skipped.empty()) {
    fmt::print(stderr, "tandem: {}\n", describe_skipped(found));
  }
  return found.files;
}

void print(const FileScore& total, size_t files) {
  if (total.bytes == 0)
    throw InvalidArgument("--data: the files hold no bytes: expected some text");
  fmt::print("{:.4f} bits per byte over {} bytes in {} files\n", total.bits_per_byte(), total.bytes,
             files);
}

void print_json(const std::vector<FileScore>& scores, const std::string& json) {
  FileScore total;
  nlohmann::ordered_json files = nlohmann::ordered_json::array();
  for (const FileScore& score : scores) {
    total.bytes += score.bytes;
    total.nats += score.nats;
    files.push_back(
        {{"path", score.path}, {"bytes", score.bytes}, {"bits_per_byte", score.bits_per_byte()}});
  }
  if (json != "-") print(total, scores.size());
  const nlohmann::ordered_json root{{"bits_per_byte", total.bits_per_byte()},
                                    {"bytes", total.bytes},
                                    {"nats", total.nats},
                                    {"files", files}};
  const std::string text =
      root.dump(1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
  json == "-" ? fmt::print("{}", text) : write_output(json, text);
}

/// How far the evaluation is: nothing is shown of what takes a second at most.
class EvalProgress {
 public:
  explicit EvalProgress(const std::vector<std::string>& files) {
    for (const std::string& file : files) {
      std::error_code gone;  // is for who reads it
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
  Progress progress_;
  std::optional<ProgressLine> line_;
};

struct Inputs {
  const ModelConfig& config;
  const SafetensorsFile& weights;
  const std::vector<std::string>& files;
};

void load(const SafetensorsFile& weights, Transformer& model) {
  load_parameters(weights, model.parameter_list(), model.parameters());
  model.parameters_changed();
}

/// Collective: every format on all text, one evaluation after the other.
void sweep(Communicator& comm, const EvalArguments& arguments, const Inputs& inputs) {
  Sweep all{{}, inputs.config, comm.size(), arguments.options.dtype, 0};
  for (const Wire& wire : sweep_wires()) {
    EvaluateOptions options = arguments.options;
    options.codec = {wire, wire};
    Evaluator evaluator(comm, inputs.config, options);
    load(inputs.weights, evaluator.model());
    const FileScore total = evaluator.total(inputs.files);
    all.bytes = total.bytes;
    all.points.push_back({wire, total.bits_per_byte()});
    if (comm.rank() == 0) log_message(LogLevel::info, "codec " + wire.describe());
  }
  if (comm.rank() != 0) return;
  write_output(arguments.sweep + ".json", all.json());
  write_output(arguments.sweep + ".svg", all.svg());
  fmt::print("{}", all.table());
}

void check_codec(const EvalArguments& arguments, const ModelConfig& config, int ranks) {
  arguments.options.codec.require_used(config, ranks);
  if (ranks > 1 || arguments.sweep.empty()) return;
  throw InvalidArgument(
      "--codec-sweep with 1 rank, which sends nothing: expected --tp of 2 or "
      "more");
}

void run(EvalArguments arguments) {
  if (speaks() && !arguments.json.empty() && arguments.json != "-") check_writable(arguments.json);
  now_doing("evaluating " + arguments.directory);
  const std::string directory = model_directory(arguments.directory);
  const ModelConfig config = load_model_config(directory);
  const std::vector<std::string> files = files_of(arguments);
  arguments.options.dtype = parse_dtype(arguments.dtype);
  arguments.options.codec = CodecPolicy::parse(arguments.codec);
  if (arguments.tp > 0) config.check(arguments.tp);
  const SafetensorsFile weights(directory + "/model.safetensors");
  weights.verify();
  const std::string identity = model_identity(config, weights), text = text_identity(files);
  WorldOptions world;
  world.ranks = std::max(1, arguments.tp);
  run_world(world, [&](Communicator& comm) {
    if (arguments.tp > 0 && comm.size() != arguments.tp) {
      throw InvalidArgument(
          fmt::format("--tp {}: mpirun started {} ranks: expected {} or none given", arguments.tp,
                      comm.size(), comm.size()));
    }
    comm.require_same("the model", identity);
    comm.require_same("the text", text);
    const EvaluateOptions& options = arguments.options;
    comm.require_same("options", fmt::format("--seq {} --stride {} --batch {} --dtype {} --json {} "
                                             "--codec {} --codec-sweep {}",
                                             options.seq, options.stride, options.batch,
                                             arguments.dtype, !arguments.json.empty(),
                                             options.codec.describe(), !arguments.sweep.empty()));
    check_codec(arguments, config, comm.size());
    config.check(comm.size());
    set_kernel_threads(threads_per_rank(comm.size()));
    if (!arguments.sweep.empty()) return sweep(comm, arguments, {config, weights, files});
    Evaluator evaluator(comm, config, arguments.options);
    load(weights, evaluator.model());
    std::optional<EvalProgress> progress;
    if (comm.rank() == 0) {
      progress.emplace(files);
      evaluator.on_batch([&](int64_t bytes) { progress->scored(bytes); });
    }
    if (arguments.json.empty()) {
      const FileScore total = evaluator.total(files);
      progress.reset();
      if (comm.rank() == 0) print(total, files.size());
      return;
    }
    std::vector<FileScore> scores;
    for (const std::string& file : files) scores.push_back(evaluator.score(file));
    progress.reset();
    if (comm.rank() == 0) print_json(scores, arguments.json);
  });
}

}  // namespace

void add_eval(CLI::App& app) {
  auto* command = app.add_subcommand("eval", "Bits per byte of text under a trained model");
  auto arguments = std::make_shared<EvalArguments>();
  command
      ->add_option("dir", arguments->directory,
                   "What train left: --out, its final/ or a checkpoint")
      ->required();
  command->add_option("--data", arguments->data, "Folders, globs and files");
  command->add_option("--list", arguments->list,
                      "File with one path per line (OUT/heldout.txt), or each ended by NUL");
  command->add_option("--tp", arguments->tp, "Tensor parallel ranks (default: 1; under mpirun all)")
      ->check(CLI::Range(1, 4096));
  command
      ->add_option("--seq", arguments->options.seq, "Tokens of a window (0: the model's longest)")
      ->capture_default_str();
  command
      ->add_option("--stride", arguments->options.stride,
                   "Bytes scored per window after the first (0: half a window)")
      ->capture_default_str();
  command->add_option("--batch", arguments->options.batch, "Windows at once")
      ->capture_default_str()
      ->check(CLI::Range(1, 65536));
  command->add_option("--dtype", arguments->dtype, "Of matrix products")
      ->check(CLI::IsMember({"f32", "bf16"}))
      ->capture_default_str();
  command
      ->add_option("--codec", arguments->codec,
                   "What sums over ranks travel as: int8, or mlp=int4:g32,attention=int8")
      ->capture_default_str();
  command->add_option("--codec-sweep", arguments->sweep,
                      "Every format: a table; PREFIX.json and PREFIX.svg");
  command->add_option("--json", arguments->json,
                      "Result with every file as JSON: FILE, or - for stdout");
  command->footer(
      "\nExamples:\n"
      "  tandem eval out/tiny --data include                one figure for all files\n"
      "  tandem train configs/tiny.toml --out out/part --set data.heldout=0.3\n"
      "  tandem eval out/part --list out/part/heldout.txt --json scores.json\n"
      "  tandem eval out/tiny/checkpoints/step-00000050 --data include --tp 2\n"
      "  tandem eval out/tiny --data include --tp 2 --codec int4:g32   what the codec costs\n"
      "  tandem eval out/tiny --data include --tp 2 --codec-sweep codecs");
  command->callback([arguments] { run(*arguments); });
}

}  // namespace tandem::cli
