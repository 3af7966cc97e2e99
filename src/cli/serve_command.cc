#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "cli/commands.h"
#include "cli/devices.h"
#include "cli/text_model.h"
#include "core/system/console.h"
#include "core/system/env.h"
#include "core/system/printable.h"
#include "engine/checkpoint/stored_model.h"
#include "engine/infer/sampling/generation_config.h"
#include "engine/launch/stop_signals.h"
#include "engine/serve/http/completion_server.h"
#include "engine/serve/prompt_tokens.h"
#include "engine/serve/serve_loop.h"
#include "tandem/error.h"

namespace tandem::cli {
namespace {

constexpr int64_t kMaxContext = 4096;  // unless --context says more
constexpr int64_t kGpuMixedRows =
    256;                     // a step of 8 B parameters then takes less than twice as long
constexpr int kUnended = 5;  ///< exit code: a wait passed its deadline

struct ServeArguments {
  std::string directory, address = "8000", name, dtype, weights = "none", codec = "none";
  int ranks = 1;
  DeviceOptions devices;
  int64_t batch = 16, context = 0, prompt_rows = 0, mixed_rows = 0, queue = 256;
  bool share_prefixes = true, batch_invariant = false;
};

/// Last folder of the model's path.
std::string default_name(const std::string& directory) {
  const std::filesystem::path path = std::filesystem::absolute(directory).lexically_normal();
  return (path.has_filename() ? path : path.parent_path()).filename().string();
}

ServedModel make_served_model(const ServeArguments& arguments, const StoredModel& stored) {
  ServedModel model;
  model.stored = &stored;
  model.name = arguments.name.empty() ? default_name(arguments.directory) : arguments.name;
  const GenerationDefaults defaults = read_generation_defaults(stored, note);
  if (stored.tokenizer) model.eos_token_ids = defaults.eos_token_ids;
  model.sampling.temperature = defaults.temperature.value_or(1);
  model.sampling.top_k = defaults.top_k.value_or(0);
  model.sampling.top_p = defaults.top_p.value_or(1);
  model.rules = defaults.rules;
  check_defaults(stored, model.sampling, model.rules);
  try {
    model.chat = open_chat_template(stored);
  } catch (const NoChatTemplate& error) {
    model.chat_problem = error.what();
  }
  const int64_t max_seq = stored.config.max_seq;
  model.capacity = arguments.context == 0 ? std::min(max_seq, kMaxContext) : arguments.context;
  if (model.capacity > max_seq) {
    throw InvalidArgument(
        fmt::format("--context {}: expected at most {}, the model's", model.capacity, max_seq));
  }
  return model;
}

EngineOptions engine_options(const ServeArguments& arguments, const ServedModel& model,
                             const CodecPolicy& policy) {
  EngineOptions options;
  options.dtype = parse_dtype(arguments.dtype);
  options.capacity = model.capacity;
  options.sequences = arguments.batch;
  options.mixed_rows = arguments.mixed_rows;
  if (options.mixed_rows == 0 && arguments.devices.on_gpus()) options.mixed_rows = kGpuMixedRows;
  set_step_rows(options, prompt_rows(arguments.prompt_rows, arguments.devices),
                arguments.devices.on_gpus());
  options.share_prefixes = arguments.share_prefixes;
  options.batch_invariant = arguments.batch_invariant;
  options.codec = policy;
  options.weights = parse_weight_format(arguments.weights);
  options.tokenizer = model.stored->tokenizer.get();
  return options;
}

/// Ends the loop of rank 0 on the first request to stop.
class StopWatch {
 public:
  StopWatch(const StopSignals& signals, ServeLoop& loop)
      : thread_([&signals, &loop](const std::stop_token& over) {
          while (!over.stop_requested() && !signals.came()) {
            std::this_thread::sleep_for(std::chrono::milliseconds(50));
          }
          loop.end();
        }) {}

 private:
  std::jthread thread_;
};

/// Ends the process where work of the server does not end: it reads what would be destroyed.
/// `error`: that ends the server, or nullptr.
void close_server(CompletionServer& server, const std::exception* error) {
  const std::string unended = server.close();
  if (unended.empty()) return;
  if (error) complain(fmt::format("tandem: error: {}", single_line(error->what())));
  complain(fmt::format("tandem: error: serve: {}", unended));
  const auto* const named = dynamic_cast<const Error*>(error);
  std::_Exit(named ? named->exit_code() : kUnended);
}

/// Rank 0 of `serve`.
void answer_clients(Communicator& tp, const ServedModel& model, Engine& engine,
                    CompletionServer& server, ServeLoop& loop, const StopSignals& signals) {
  server.open(model, loop);
  complain(fmt::format("Serving {} at {}{}", single_line(model.name), server.url(),
                       server.is_local() ? "" : ", for everyone who reaches this machine"));
  const StopWatch watch(signals, loop);
  try {
    loop.run(tp, engine,
             [&](std::vector<TokenEvent> tokens) { server.deliver(std::move(tokens)); });
  } catch (const std::exception& error) {  // as of a rank that is lost
    loop.end();
    server.fail(error.what());
    close_server(server, &error);
    throw;
  }
  close_server(server, nullptr);
}

void serve(Communicator& tp, const ServedModel& model, const EngineOptions& options,
           CompletionServer* server, ServeLoop& loop, const StopSignals& signals) {
  Engine engine(tp, model.stored->config, options);
  const LoadedWeights loaded = load_weights(tp, *model.stored, engine);
  if (tp.rank() != 0) return loop.run(tp, engine, {});
  complain(describe(loaded));
  answer_clients(tp, model, engine, *server, loop, signals);
}

void run(ServeArguments arguments) {
  const CodecPolicy policy = CodecPolicy::parse(arguments.codec);
  const ListenAddress address = parse_listen_address("--port", arguments.address);
  WorldOptions world;
  world.ranks = arguments.ranks;
  now_doing("serving " + arguments.directory);
  const StopSignals signals(speaks() ? "ends with the texts that are being written; again: at once"
                                     : "");
  std::signal(SIGPIPE, SIG_IGN);  // texts are finished without a reader of the log
  std::unique_ptr<CompletionServer> server;
  if (speaks()) {
    server = start_completion_server({address, env().api_key});
  }
  const TextNeeds needs{.weights = arguments.weights,
                        .batch_invariant = arguments.batch_invariant,
                        .texts = arguments.batch};
  const StoredModel stored =
      open_text_model(arguments.directory, arguments.devices, world, arguments.dtype, needs);
  const ServedModel model = make_served_model(arguments, stored);
  ServeLoop loop(arguments.queue);
  // Also after an exception its thread ends before what it answers with.
  const std::unique_ptr<CompletionServer> serving = std::move(server);
  run_ranks(arguments.devices, world, [&](Communicator& tp) {
    tp.require_same("the model", stored.identity);
    tp.require_same(
        "options",
        fmt::format("--context {} --batch {} --prompt-rows {} --mixed-rows {} {} {} "
                    "--dtype {} --weights {} --codec {}",
                    model.capacity, arguments.batch, arguments.prompt_rows, arguments.mixed_rows,
                    arguments.share_prefixes ? "" : "--no-shared-prefixes",
                    arguments.batch_invariant ? "--batch-invariant" : "", arguments.dtype,
                    arguments.weights, policy.describe()));
    policy.require_used(stored.config, tp.size());
    serve(tp, model, engine_options(arguments, model, policy), serving.get(), loop, signals);
  });
}

}  // namespace

void add_serve(CLI::App& app) {
  auto arguments = std::make_shared<ServeArguments>();
  auto* command = app.add_subcommand("serve", "Serve completions by HTTP, with OpenAI's API");
  add_model_option(*command, arguments->directory);
  command->option_defaults()->group("Server");
  command
      ->add_option(
          "--port", arguments->address,
          "Address to listen at (0: a free port; default host: 127.0.0.1, this machine only)")
      ->capture_default_str();
  command->add_option("--name", arguments->name,
                      "Model name in the API (default: the folder's name)");
  command->option_defaults()->group("Ranks and arithmetic");
  add_tp_option(*command, arguments->ranks)->check(CLI::Range(1, 4096));
  add_compute_options(*command, arguments->dtype, arguments->weights, arguments->devices,
                      arguments->codec);
  command->option_defaults()->group("Batches");
  command->add_option("--batch", arguments->batch, "Sequences generated at once")
      ->capture_default_str()
      ->check(CLI::Range(1, 4096));
  command
      ->add_option(
          "--context", arguments->context,
          fmt::format("Max tokens of a prompt and its completion (default: the model's, at "
                      "most {})",
                      kMaxContext))
      ->check(CLI::Range(int64_t(2), int64_t(1) << 24));
  add_prompt_rows_option(*command, arguments->prompt_rows);
  command
      ->add_option("--mixed-rows", arguments->mixed_rows,
                   fmt::format("Max rows of a step that also generates tokens, which fewer rows "
                               "delay less (default: all on CPUs, {} on GPUs)",
                               kGpuMixedRows))
      ->check(CLI::Range(1, 1 << 16));
  command->add_flag("!--no-shared-prefixes", arguments->share_prefixes,
                    "Compute the first tokens of a prompt although the cache has those of another "
                    "text");
  add_batch_invariant_flag(*command, arguments->batch_invariant);
  command
      ->add_option("--queue", arguments->queue,
                   "Max sequences that are generated or wait; others get status 429")
      ->capture_default_str()
      ->check(CLI::Range(1, 1 << 20));
  command->footer(R"(
Paths: /v1/completions and /v1/chat/completions (with "stream": true, too), /v1/models,
/v1/models/NAME, /tokenize, /health, /metrics (Prometheus), and / for a page to chat. If
TANDEM_API_KEY is set, requests must give it as a bearer token.

Examples:
  tandem serve out/tiny --tp 2
  curl http://127.0.0.1:8000/v1/completions -d '{"prompt": "int main", "max_tokens": 40}'
)");
  command->callback([arguments] { run(*arguments); });
}

}  // namespace tandem::cli
