#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "cli/commands.h"
#include "cli/evaluation.h"
#include "cli/result_output.h"
#include "core/system/console.h"
#include "core/system/json.h"
#include "core/system/log.h"
#include "engine/plan/codecs/codec_search.h"
#include "tandem/error.h"

namespace tandem::cli {
namespace {

struct TuneArguments {
  std::string budget;
  ResultOutput output;
  std::vector<std::string> formats{"lossless", "int8",         "int6",  "int5",
                                   "int4:g32", "int4",         "mxfp4", "int3:g32:spikes",
                                   "int3:g32", "int2:g32:asym"};
  EvaluationArguments evaluation;
};

std::vector<Wire> formats_of(const TuneArguments& arguments) {
  std::vector<Wire> wires;
  for (const std::string& text : arguments.formats) {
    const Wire wire = Wire::parse(text);
    if (wire.is_none()) {
      throw InvalidArgument("--formats none: expected codecs: no codec is always a candidate");
    }
    wires.push_back(wire);
  }
  return wires;
}

/// Format of the trial's only site, or the policy.
std::string codec_of(const CodecTrial& trial, const ModelConfig& model) {
  for (const CodecSite& site : codec_sites(model)) {
    if (site.name == trial.site) return (trial.policy.*site.wires.front()).describe();
  }
  return trial.policy.describe();
}

std::string table(const CodecChoice& choice, const ModelConfig& model) {
  const double uncompressed = choice.uncompressed().bytes;
  std::string text =
      "| site | codec | bytes sent per token and rank | saves | bits per byte | rise |\n"
      "| --- | --- | --- | --- | --- | --- |\n";
  for (const CodecTrial& trial : choice.trials) {
    const bool is_uncompressed = &trial == &choice.trials.front();
    const std::string_view site = is_uncompressed      ? "none"
                                  : trial.site.empty() ? "together"
                                                       : std::string_view(trial.site);
    text += fmt::format("| {} | {} | {:.0f} | {:.1f} % | {:.4f} | {:+.3f} % |\n", site,
                        codec_of(trial, model), trial.bytes, 100 * (1 - trial.bytes / uncompressed),
                        trial.bits_per_byte, 100 * trial.rise);
  }
  const CodecTrial& best = choice.best();
  text += fmt::format(
      "\nWithin {:g} %: {} ({:+.3f} %, {:.0f} of {:.0f} bytes).\n"
      "Takes it: tandem train, eval or generate --codec {}\n",
      100 * choice.budget, best.policy.describe(), 100 * best.rise, best.bytes, uncompressed,
      best.policy.describe());
  return text;
}

nlohmann::ordered_json json_of(const CodecTrial& trial) {
  nlohmann::ordered_json json{{"policy", trial.policy.describe()}};
  if (!trial.site.empty()) json["site"] = trial.site;
  json["bits_per_byte"] = trial.bits_per_byte;
  json["rise"] = trial.rise;
  json["bytes_per_token"] = trial.bytes;
  return json;
}

std::string json(const CodecChoice& choice, const SentBytes& sent, int64_t bytes) {
  nlohmann::ordered_json trials = nlohmann::ordered_json::array();
  for (const CodecTrial& trial : choice.trials) trials.push_back(json_of(trial));
  const CodecTrial& best = choice.best();
  nlohmann::ordered_json root{{"policy", best.policy.describe()},
                              {"budget", choice.budget},
                              {"rise", best.rise},
                              {"bytes_per_token", best.bytes},
                              {"uncompressed_bytes_per_token", choice.uncompressed().bytes},
                              {"trials", trials}};
  add_origin(root, sent, bytes);
  return dump_json(root, 1) + "\n";
}

void tune(Communicator& comm, const TuneArguments& arguments, const std::vector<Wire>& formats,
          double budget, const EvaluationInputs& inputs) {
  if (comm.size() == 1) {
    throw InvalidArgument("tune with 1 rank, which sends nothing: expected --tp of 2 or more");
  }
  EvaluateOptions options = arguments.evaluation.options;
  options.overlap.strategy = Strategy::serial;  // all strategies give the same bits
  int64_t bytes = 0;
  const auto bits_per_byte = [&](const CodecPolicy& policy) {
    options.codec = policy;
    Evaluator evaluator(comm, inputs.config, options);
    inputs.load_into(comm, evaluator.model());
    const FileScore total = evaluator.total(inputs.files);
    bytes = total.bytes;
    if (bytes == 0) throw InvalidArgument("--data: the files hold no bytes: expected some text");
    if (comm.rank() == 0) log_message(LogLevel::info, "codec " + policy.describe());
    return total.bits_per_byte();
  };
  const SentBytes sent{inputs.config, comm.size(), options.dtype};
  const CodecChoice choice = search_codecs(sent, formats, budget, bits_per_byte);
  if (comm.rank() != 0) return;
  if (arguments.output.shows_text()) fmt::print("{}", table(choice, sent.model));
  arguments.output.write_json(json(choice, sent, bytes));
}

void run(TuneArguments arguments) {
  const std::optional<double> budget = parse_percentage(arguments.budget);
  if (!budget) {
    throw InvalidArgument(fmt::format("--budget {}: expected {}", arguments.budget, kPercentage));
  }
  const std::vector<Wire> formats = formats_of(arguments);
  arguments.output.check();
  now_doing("tuning codecs of " + arguments.evaluation.directory);
  arguments.evaluation.needs_text = true;
  arguments.evaluation.devices.device = "cpu";  // the only one of all formats
  std::string agreed =
      fmt::format("--budget {}% --json {} --formats", 100 * *budget, arguments.output.is_given());
  for (const Wire& wire : formats) agreed += " " + wire.describe();
  evaluate_on_ranks(arguments.evaluation, 2, agreed,
                    [&](Communicator& comm, const EvaluationInputs& inputs) {
                      tune(comm, arguments, formats, *budget, inputs);
                    });
}

}  // namespace

void add_tune(CLI::App& app) {
  auto* command = app.add_subcommand("tune", "Find the cheapest codecs of a model for a budget");
  auto arguments = std::make_shared<TuneArguments>();
  add_evaluation_options(*command, arguments->evaluation,
                         "Tensor parallel ranks (default: 2; under mpirun all)");
  command
      ->add_option("--budget", arguments->budget,
                   "Max rise of bits per byte over no codec, such as 0.5%")
      ->required();
  command->add_option("--formats", arguments->formats, "Candidate formats of every site")
      ->delimiter(',')
      ->capture_default_str();
  add_json_option(*command, arguments->output, "the choice and all measurements");
  command->footer(
      "\nScores text that the model has not seen with each format at each site: the attention\n"
      "output, the MLP output, what goes to experts and back, and the embeddings; then the\n"
      "formats that save the most bytes within the budget together. Fewer bytes are not always\n"
      "faster: `tandem bench gemm_rs --codec` times them.\n"
      "\nExamples:\n"
      "  tandem tune out/part --list out/part/heldout.txt --budget 0.5%\n"
      "  tandem tune out/tiny --data include --budget 0% --formats lossless --json codecs.json");
  command->callback([arguments] { run(*arguments); });
}

}  // namespace tandem::cli
