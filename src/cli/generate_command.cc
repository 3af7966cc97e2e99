#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cli/generate.h"
#include "cli/result_output.h"
#include "cli/text_model.h"
#include "core/system/console.h"
#include "core/system/console_input.h"
#include "core/system/files.h"
#include "core/system/json.h"
#include "core/system/process/clock.h"
#include "engine/infer/engine.h"
#include "engine/infer/rows.h"
#include "engine/infer/sampling/generation_config.h"
#include "engine/serve/prompt_tokens.h"
#include "overlap/contract/receipt.h"
#include "tandem/communicator.h"
#include "tandem/error.h"

namespace tandem::cli {

void put(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
  finish_output();
}

namespace {

constexpr size_t kMaxPromptMib = 16;
constexpr int64_t kMaxBatch = 4096;

/// Resolves "-" to the input of rank 0, as mpirun forwards standard input only to it.
std::string prompt_of(Communicator& tp, const std::string& typed) {
  if (typed != "-") return typed;
  const std::string local = tp.rank() == 0 ? read_input("--prompt -", kMaxPromptMib) : "";
  const auto blobs = tp.exchange(std::as_bytes(std::span(local)), "prompt");
  return {reinterpret_cast<const char*>(blobs[0].data()), blobs[0].size()};
}

/// Output of rank 0: the text and its timing.
class Report {
 public:
  Report(const GenerateArguments& arguments, std::string prompt, size_t prompt_tokens, int ranks)
      : arguments_(arguments),
        prompt_(std::move(prompt)),
        prompt_tokens_(prompt_tokens),
        ranks_(ranks) {
    if (shows() && arguments.chat.empty()) put(prompt_);
  }
  void add(const TokenEvent& event) {
    text_ += event.text;
    if (shows()) put(event.text);
    dropped_ += event.dropped;
    if (event.finish == Finish::end_token) return;
    last_ = Clock::now();
    if (tokens_++ == 0) first_ = last_;
    token_ids_.push_back(event.token);
  }
  /// `last`: the last event; nullptr if no token was asked for.
  void end(const TokenEvent* last, const Engine& engine, const LoadedWeights& loaded) const {
    if (shows()) put("\n");
    const double prompt_s = tokens_ > 0 ? seconds_between(begin_, first_) : seconds_since(begin_);
    const double rest_s = seconds_between(first_, last_);
    const double rate = tokens_ > 1 && rest_s > 0 ? double(tokens_ - 1) / rest_s : 0;
    complain(describe(loaded));
    complain(
        fmt::format("{} tokens: the first after {:.3f} s with a prompt of {}, the others at {:.1f} "
                    "tokens/s",
                    tokens_, prompt_s, prompt_tokens_, rate));
    const int64_t rolled = engine.stats().rolled;
    if (dropped_ > 0) {
      complain(fmt::format(
          "context of {} tokens (max_seq): the first {} of the prompt's {} were dropped",
          engine.capacity(), dropped_, prompt_tokens_));
    }
    if (rolled > 0) {
      complain(fmt::format("context of {} tokens (max_seq): full {} times, its first half dropped",
                           engine.capacity(), rolled));
    }
    if (!arguments_.output.is_given()) return;
    nlohmann::ordered_json root{{"prompt", prompt_},
                                {"text", text_},
                                {"ended_by", name_of(last ? *last->finish : Finish::max_tokens)},
                                {"ranks", ranks_},
                                {"codec", arguments_.policy.describe()},
                                {"prompt_tokens", prompt_tokens_},
                                {"dropped_prompt_tokens", dropped_},
                                {"context_refills", rolled},
                                {"tokens", tokens_},
                                {"token_ids", token_ids_},
                                {"load_s", loaded.seconds},
                                {"loaded_bytes", int64_t(loaded.bytes)},
                                {"prefill", engine.form().name},
                                {"first_token_s", prompt_s},
                                {"tokens_per_s", rate},
                                {"receipts", to_json(receipts())}};
    if (last && !last->stop.empty()) root["stop"] = last->stop;
    const std::string json = dump_json(root, 1) + "\n";
    shows() ? arguments_.output.write_json(json) : put(json);
  }

 private:
  using Clock = std::chrono::steady_clock;
  bool shows() const { return arguments_.output.shows_text(); }

  const GenerateArguments& arguments_;
  const std::string prompt_;
  const size_t prompt_tokens_;
  const int ranks_;
  std::string text_;
  int64_t tokens_ = 0, dropped_ = 0;
  std::vector<int32_t> token_ids_;
  const Clock::time_point begin_ = Clock::now();
  Clock::time_point first_ = begin_, last_ = begin_;
};

/// Rows of a step on CPU ranks: the prompt's, rounded up to a multiple of 32, so that the tuner's
/// times apply to other prompts, too.
int64_t rows_for(int64_t prompt, const ModelConfig& config) {
  const int64_t rounded = (std::clamp<int64_t>(prompt, 1, 512) + 31) / 32 * 32;
  return std::min(rounded, std::max<int64_t>(32, config.max_seq));
}

EngineOptions engine_options(const GenerateArguments& arguments, const StoredModel& stored,
                             int64_t prompt) {
  const ModelConfig& config = stored.config;
  EngineOptions options;
  options.dtype = parse_dtype(arguments.dtype);
  options.capacity =
      std::min(config.max_seq, prompt + std::min(config.max_seq, arguments.max_tokens));
  options.sequences = 1;
  options.rows =
      arguments.devices.on_gpus() ? prompt_rows(0, arguments.devices) : rows_for(prompt, config);
  options.share_prefixes = false;  // with itself
  options.overlap.allow_uncompressed = arguments.allow_uncompressed;
  options.codec = arguments.policy;
  options.prefill = parse_prefill(arguments.prefill);
  options.batch_invariant = arguments.batch_invariant;
  options.weights = parse_weight_format(arguments.weights);
  options.tokenizer = stored.tokenizer.get();
  // CPU ranks have too few rows to overlap a GEMM with its own sums.
  if (!arguments.devices.on_gpus()) options.overlap.strategy = Strategy::serial;
  return options;
}

void generate(Communicator& tp, const GenerateArguments& arguments, const StoredModel& stored) {
  const bool is_chat = !arguments.chat.empty();
  const std::string prompt = is_chat ? arguments.prompt : prompt_of(tp, arguments.prompt);
  Request request;
  request.prompt = is_chat ? make_chat_prompt(stored, prompt) : make_prompt(stored, prompt);
  request.max_tokens = arguments.max_tokens;
  request.sampling = arguments.sampling;
  request.eos_token_ids = arguments.eos_token_ids;
  request.stops = arguments.stops;
  request.rules = arguments.rules;
  request.has_text_before = !prompt.empty();
  request.rolls = true;
  const size_t prompt_tokens = request.prompt.size();
  Engine engine(tp, stored.config, engine_options(arguments, stored, int64_t(prompt_tokens)));
  const LoadedWeights loaded = load_weights(tp, stored, engine);

  std::optional<Report> report;
  if (tp.rank() == 0) report.emplace(arguments, prompt, prompt_tokens, tp.size());
  std::optional<TokenEvent> last;
  if (request.max_tokens > 0) engine.submit(std::move(request));
  while (!engine.is_idle()) {
    for (TokenEvent& event : engine.step()) {
      if (event.finish == Finish::failed) throw InvalidArgument(event.error);
      if (report) report->add(event);
      last = std::move(event);
    }
  }
  if (report) report->end(last ? &*last : nullptr, engine, loaded);
}

/// Takes what the model's folder says on generating, unless the command line does.
void take_defaults(const StoredModel& stored, GenerateArguments& arguments) {
  GenerationDefaults defaults = read_generation_defaults(stored, note);
  if (stored.tokenizer) arguments.eos_token_ids = std::move(defaults.eos_token_ids);
  SamplingOptions& sampling = arguments.sampling;
  const auto take = [](const CLI::Option* given, const auto& value, auto& option) {
    if (given->count() == 0 && value) option = *value;
  };
  take(arguments.temperature, defaults.temperature, sampling.temperature);
  take(arguments.top_k, defaults.top_k, sampling.top_k);
  take(arguments.top_p, defaults.top_p, sampling.top_p);
  arguments.rules = std::move(defaults.rules);
  check_defaults(stored, sampling, arguments.rules);
}

/// Text of the messages in the file --chat.
std::string render_chat(const GenerateArguments& arguments, const StoredModel& stored) {
  const std::string file = read_file(arguments.chat);
  const auto chat = parse_json_exactly(file);
  if (chat.is_discarded()) {
    throw ConfigError(fmt::format("{}: {}: expected JSON", arguments.chat, json_error(file)));
  }
  const ChatTemplate form = open_chat_template(stored);
  try {
    return form.render(chat);
  } catch (const ConfigError& error) {
    throw ConfigError(fmt::format("{}: {}", arguments.chat, error.what()));
  }
}

void run(GenerateArguments arguments) {
  check(arguments.sampling);
  if (arguments.max_tokens < 0) {
    throw InvalidArgument(fmt::format("--max-tokens {}: expected 0 or more", arguments.max_tokens));
  }
  if (arguments.batch < 1 || arguments.batch > kMaxBatch) {
    throw InvalidArgument(fmt::format("--batch {}: expected 1 to {}", arguments.batch, kMaxBatch));
  }
  const StopText checked(arguments.stops);
  arguments.policy = CodecPolicy::parse(arguments.codec);
  WorldOptions world;
  world.ranks = arguments.ranks;
  if (arguments.allow_uncompressed && arguments.policy.is_none()) {
    throw InvalidArgument("--allow-uncompressed without a codec: expected --codec with it");
  }
  arguments.output.check();
  now_doing("generating with " + arguments.directory);
  const TextNeeds needs{.weights = arguments.weights,
                        .batch_invariant = arguments.batch_invariant,
                        .texts = arguments.prompts.empty() ? 1 : arguments.batch,
                        .is_iso = parse_prefill(arguments.prefill) == Strategy::overlapped};
  const StoredModel stored =
      open_text_model(arguments.directory, arguments.devices, world, arguments.dtype, needs);
  take_defaults(stored, arguments);
  const ModelConfig& config = stored.config;
  PromptFile file;
  if (!arguments.chat.empty()) arguments.prompt = render_chat(arguments, stored);
  if (!arguments.prompts.empty()) file = read_prompts(arguments, stored);
  run_ranks(arguments.devices, world, [&](Communicator& tp) {
    tp.require_same("the model", stored.identity);
    const auto& sampling = arguments.sampling;
    tp.require_same(
        "options",
        fmt::format(
            "--temperature {} --top-k {} --top-p {} --seed {} --max-tokens {} --dtype {} "
            "--weights {} --codec {}{}{} --prefill {} --stop {} eos_token_id {} --prompt-rows {} "
            "--prompt {}",
            sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed,
            arguments.max_tokens, arguments.dtype, arguments.weights, arguments.policy.describe(),
            arguments.allow_uncompressed ? " --allow-uncompressed" : "",
            arguments.batch_invariant ? " --batch-invariant" : "", arguments.prefill,
            fmt::join(arguments.stops, " --stop "), fmt::join(arguments.eos_token_ids, ","),
            arguments.prompt_rows, arguments.prompt));
    arguments.policy.require_used(config, tp.size());
    if (arguments.prompts.empty()) return generate(tp, arguments, stored);
    tp.require_same("--prompts", file.hash);
    generate_all(tp, arguments, stored, file.lines);
  });
}

void add_sampling_options(CLI::App& command, GenerateArguments& arguments) {
  command.option_defaults()->group("Sampling");
  arguments.temperature = command
                              .add_option("--temperature", arguments.sampling.temperature,
                                          "Sampling temperature (0: always the likeliest token)")
                              ->capture_default_str();
  arguments.top_k = command
                        .add_option("--top-k", arguments.sampling.top_k,
                                    "Sample among the N likeliest tokens (0: all)")
                        ->capture_default_str();
  arguments.top_p = command
                        .add_option("--top-p", arguments.sampling.top_p,
                                    "Sample among the likeliest of these that make up this share")
                        ->capture_default_str();
  command
      .add_option("--seed", arguments.sampling.seed,
                  "Seed of the samples; the same seed gives the same text")
      ->capture_default_str();
  command
      .add_option("--max-tokens", arguments.max_tokens,
                  "Max tokens to generate (bytes, without a tokenizer)")
      ->capture_default_str();
  command
      .add_option("--stop", arguments.stops,
                  "End before the first of these texts, which is not printed")
      ->allow_extra_args(false)
      ->take_all();
}

}  // namespace

void add_generate(CLI::App& app) {
  auto arguments = std::make_shared<GenerateArguments>();
  auto* command = app.add_subcommand("generate", "Continue a text with a trained model");
  add_model_option(*command, arguments->directory);
  command->option_defaults()->group("Prompts and output");
  command->add_option("--prompt", arguments->prompt,
                      "Text to continue (-: standard input; default: none)");
  command
      ->add_option("--prompts", arguments->prompts,
                   "Continue many prompts, a JSON object a line (prompt or messages, max_tokens, "
                   "temperature, top_k, top_p, seed, stop, log_probs; more in "
                   "docs/guide/generation.md), and print such lines in order")
      ->excludes("--prompt");
  command
      ->add_option("--chat", arguments->chat,
                   "Answer a chat: a JSON list of messages with role and content, formatted by the "
                   "model's template")
      ->excludes("--prompt")
      ->excludes("--prompts");
  command->add_option("--batch", arguments->batch, "Sequences of --prompts generated at once")
      ->capture_default_str();
  add_json_option(*command, arguments->output, "prompt, text and speed")->excludes("--prompts");
  add_sampling_options(*command, *arguments);
  command->option_defaults()->group("Ranks and arithmetic");
  add_tp_option(*command, arguments->ranks);
  add_prompt_rows_option(*command, arguments->prompt_rows)->needs("--prompts");
  add_batch_invariant_flag(*command, arguments->batch_invariant);
  add_compute_options(*command, arguments->dtype, arguments->weights, arguments->devices,
                      arguments->codec);
  command
      ->add_flag("--allow-uncompressed", arguments->allow_uncompressed,
                 "Also measure uncompressed forms of the prompt, with --codec, and take the "
                 "fastest; later tokens use the codec")
      ->excludes("--prompts");
  command
      ->add_option("--prefill", arguments->prefill,
                   "Form of the prompt: serial, or iso, in two chunks, one computed while the "
                   "other's sums travel; automatic measures them for prompts of 64 tokens or more, "
                   "and is serial with --weights on CPU ranks")
      ->check(CLI::IsMember({"automatic", "serial", "iso"}))
      ->excludes("--prompts")
      ->capture_default_str();
  command->footer(
      "\nExamples:\n"
      "  tandem generate out/tiny --prompt '#include <'\n"
      "  tandem generate out/tiny --prompt 'int main' --temperature 0 --max-tokens 80 --tp 2\n"
      "  tandem generate out/tiny --prompt 'int main' --tp 2 --codec int8   fewer bytes sent\n"
      "  tandem generate out/tiny --prompts prompts.jsonl --batch 32 >texts.jsonl\n"
      "  tandem generate out/tiny --prompt - --top-k 40 --stop ';' <include/tandem/random.h\n"
      "\nA folder's generation_config.json sets the defaults of --temperature, --top-k and --top-p "
      "and"
      "\nthe tokens that end a text. A line with the speed goes to standard error.");
  command->callback([arguments] { run(*arguments); });
}

}  // namespace tandem::cli
