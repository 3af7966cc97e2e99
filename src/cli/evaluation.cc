#include "cli/evaluation.h"

#include <fmt/format.h>

#include <utility>

#include "cli/text_model.h"
#include "core/system/console.h"
#include "core/system/files.h"
#include "engine/checkpoint/stored_model.h"
#include "engine/config/data_format.h"
#include "engine/config/gpu_training.h"
#include "engine/data/corpus.h"
#include "engine/data/select_data.h"
#include "engine/infer/coded_weights.h"
#include "engine/model/pretrained.h"
#include "engine/plan/cost/memory.h"
#include "tandem/error.h"

namespace tandem::cli {
namespace {

SelectedData select_files(const EvaluationArguments& arguments) {
  if (arguments.data.empty() && arguments.list.empty()) {
    throw InvalidArgument("nothing to evaluate: expected --data PATH or --list FILE");
  }
  std::vector<std::string> paths = arguments.data;
  if (!arguments.list.empty()) {
    for (std::string& path : split_paths(read_file(arguments.list, Source::any))) {
      paths.push_back(std::move(path));
    }
  }
  if (paths.empty()) {
    throw InvalidArgument(fmt::format(
        "--list {}: names no files: expected a path per line (a run holds files out with "
        "data.val_fraction above 0)",
        arguments.list));
  }
  SelectedData selected = select_data(paths, arguments.format, arguments.options.text_key);
  for (const std::string& left_out : selected.notes) note("--data: " + left_out);
  if (arguments.needs_text && !has_text(selected.format)) {
    throw InvalidArgument(fmt::format(
        "{}: {}: expected text or JSON Lines, of which bits per byte are known (tandem eval "
        "--codec scores the others with one codec)",
        paths[0], find_data_format(selected.format)->words));
  }
  return selected;
}

/// Sets the devices and their dtype where they were not given.
void set_evaluation_devices(EvaluationArguments& arguments, const ModelConfig& config,
                            WorldOptions& world) {
  const int ranks = count_ranks(world);
  const auto check_gpus = [&] {
    if (config.experts > 0 && arguments.dtype == "f32") {
      throw Unsupported("--dtype f32 with experts: expected bf16 on GPUs");
    }
    check_gpu_passes(config, ranks);
    constexpr double kBytes = 10;  // of a weight, in f32 and bf16, and its gradient
    return kBytes * double(config.parameters()) / ranks;
  };
  set_devices(arguments.devices, world, {arguments.cpu_only, check_gpus});
  if (arguments.devices.on_gpus()) {
    if (!arguments.cpu_only.empty()) {
      throw Unsupported(arguments.cpu_only + " on GPUs: expected CPU ranks");
    }
    check_gpus();
  }
  if (arguments.dtype.empty() && parse_weight_format(arguments.weights)) arguments.dtype = "f32";
  arguments.dtype = text_dtype(arguments.dtype, arguments.devices);
}

}  // namespace

void add_evaluation_options(CLI::App& command, EvaluationArguments& arguments,
                            const std::string& tp_help) {
  EvaluateOptions& options = arguments.options;
  command
      .add_option("dir", arguments.directory,
                  "Folder that tandem train wrote (its --out, final/ or a checkpoint), or a "
                  "Hugging Face folder")
      ->required();
  command.add_option("--data", arguments.data, "Folders, globs and files");
  command.add_option("--list", arguments.list,
                     "File with one path per line (OUT/heldout.txt), or each ended by NUL");
  command.add_option("--format", arguments.format, "Format of the files (data.format)")
      ->check(CLI::IsMember(data_format_names()))
      ->capture_default_str();
  command.add_option("--text-key", options.text_key, "Key of texts in JSON Lines (data.text_key)")
      ->capture_default_str();
  command.add_option("--tp", arguments.tp, tp_help)->check(CLI::Range(1, 4096));
  command.add_option("--seq", options.seq, "Tokens of a window (default: 0, the model's longest)")
      ->capture_default_str();
  command
      .add_option("--stride", options.stride,
                  "Tokens scored per window after the first (default: 0, half a window)")
      ->capture_default_str();
  command.add_option("--batch", options.batch, "Windows evaluated at once")
      ->capture_default_str()
      ->check(CLI::Range(1, 65536));
  command
      .add_option("--dtype", arguments.dtype,
                  "Data type of matrix products (default: f32 on CPUs, bf16 on GPUs)")
      ->check(CLI::IsMember({"f32", "bf16"}));
}

void EvaluationInputs::load_into(Communicator& tp, Transformer& model) const {
  load_parameters(weights, model.parameter_list(), model.exec(), model.parameters());
  if (format) {
    round_to_format(model.exec(), ModelLayout(config, tp.size(), tp.rank()), *format,
                    model.parameters());
  }
  model.parameters_changed();
}

void evaluate_on_ranks(EvaluationArguments& arguments, int ranks, const std::string& agreed,
                       const std::function<void(Communicator&, const EvaluationInputs&)>& body) {
  const StoredModel stored = open_model(arguments.directory, note);
  const ModelConfig& config = stored.config;
  const SelectedData selected = select_files(arguments);
  const std::vector<std::string>& files = selected.files;
  EvaluateOptions& options = arguments.options;
  options.format = selected.format;
  options.tokenizer = stored.tokenizer;
  if (arguments.tp > 0) config.check(arguments.tp);
  WorldOptions world;
  world.ranks = arguments.tp > 0 ? arguments.tp : ranks;
  set_evaluation_devices(arguments, config, world);
  options.dtype = parse_dtype(arguments.dtype);
  const std::optional<WeightFormat> format = parse_weight_format(arguments.weights);
  if (format && options.dtype != DType::f32) {
    throw InvalidArgument(fmt::format("--weights {} with --dtype {}: expected f32",
                                      arguments.weights, arguments.dtype));
  }
  const std::string text = launched() ? "" : text_identity(files);
  if (!arguments.devices.on_gpus()) check_memory(config, options);
  run_ranks(arguments.devices, world, [&](Communicator& comm) {
    if (arguments.tp > 0 && comm.size() != arguments.tp) {
      throw InvalidArgument(
          fmt::format("--tp {}: the launcher started {} ranks: expected {} or none given",
                      arguments.tp, comm.size(), comm.size()));
    }
    comm.require_same("the model", stored.identity);
    // Threads share the text; processes hash it collectively.
    comm.require_same("the text", launched() ? text_identity(files, &comm) : text);
    comm.require_same(
        "options",
        fmt::format(
            "--format {} --text-key {} --seq {} --stride {} --batch {} --dtype {} --weights {} {}",
            options.format, options.text_key, options.seq, options.stride, options.batch,
            arguments.dtype, arguments.weights, agreed));
    config.check(comm.size());
    if (format) check_coded_weights(config, comm.size(), *format);
    body(comm, {stored.directory, config, stored.weights, files, stored.side, format});
  });
}

}  // namespace tandem::cli
