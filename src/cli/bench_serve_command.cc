#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "bench/engine/bench_serve.h"
#include "bench/output/bench_output.h"
#include "bench/output/load_chart.h"
#include "cli/commands.h"
#include "cli/result_output.h"
#include "cli/served_folder.h"
#include "core/system/console.h"
#include "core/system/env.h"
#include "core/system/files.h"
#include "core/system/json.h"
#include "core/system/output.h"
#include "core/system/printable.h"
#include "core/system/terminal.h"
#include "tandem/error.h"
#include "tandem/world.h"

namespace tandem::cli {
namespace {

constexpr int kMaxAwaited = 1024;  // texts, of a load at random times

struct ServeBenchArguments {
  std::string server, chart;  ///< server: its URL, or a model's folder
  ResultOutput output;
  std::vector<std::string> serve_options;  ///< of `tandem serve`, for a folder
  ServeLoad load;
  std::vector<int> streams{1, 4, 16};
  std::vector<double> rates;
  double deadline_s = 600;
};

/// Null: no text had such a time.
nlohmann::ordered_json seconds_json(const ServeTimes& times) {
  if (times.p99 == 0) return nullptr;
  const auto ms = [](double s) { return round_to(s * 1e3, 1000); };
  return {{"p50", ms(times.p50)}, {"p90", ms(times.p90)}, {"p99", ms(times.p99)}};
}

nlohmann::ordered_json length_json(int64_t given, const LengthDistribution& drawn) {
  if (given > 0) return given;
  return {{"median", drawn.median}, {"sigma", drawn.sigma}, {"min", drawn.min}, {"max", drawn.max}};
}

nlohmann::ordered_json json_of(const ServeLoad& q, const ServeResult& r) {
  nlohmann::ordered_json json = {{"op", "serve"}, {"model", q.model}};
  json["endpoint"] = q.is_chat ? "chat" : "completions";
  json["concurrency"] =
      q.rate > 0 ? nlohmann::ordered_json(nullptr) : nlohmann::ordered_json(q.streams);
  json["rate"] = q.rate > 0 ? nlohmann::ordered_json(q.rate) : nullptr;
  json["prompt"] = length_json(q.prompt, kChatPrompts);
  json["new"] = length_json(q.max_tokens, kChatTexts);
  json["shared_prefix"] = q.prefix;
  json["share"] = q.prefix > 0 ? q.share : 0;
  json["seed"] = q.seed;
  json["requests"] = r.requests;
  json["whole"] = r.whole;
  json["prompt_tokens"] = r.prompt_tokens;
  json["tokens"] = r.tokens;
  json["tokens_are"] = r.is_counted ? "counted by the server" : "parts";
  json["cached_tokens"] = r.cached_tokens;
  json["prefix_hit"] =
      round_to(double(r.cached_tokens) / double(std::max<int64_t>(1, r.prompt_tokens)), 1000);
  json["seconds"] = round_to(r.seconds, 1e6);
  json["tokens_per_s"] = round_to(r.tokens_per_s(), 10);
  json["requests_per_s"] = round_to(double(r.whole) / r.seconds, 1000);
  json["ttft_ms"] = seconds_json(r.first_token);
  json["itl_ms"] = seconds_json(r.next_token);
  json["mean_token_ms"] = seconds_json(r.mean_token);
  json["text_ms"] = seconds_json(r.text);
  if (!r.error.empty()) json["error"] = r.error;
  return json;
}

constexpr const char* kHeader =
    "  load           texts  failed  tokens/s  first token ms, p50     p99  next token ms, p50    "
    "p99"
    "   mean  cached %\n";

std::string ms_text(double s, int digits) {
  return s > 0 ? fmt::format("{:.{}f}", s * 1e3, digits) : "–";
}

std::string row_of(const ServeLoad& q, const ServeResult& r) {
  const std::string load =
      q.rate > 0 ? fmt::format("{} a second", q.rate) : fmt::format("{} streams", q.streams);
  return fmt::format(
      "  {:<14}{:>6}{:>8}{:>10.1f}{:>21}{:>8}{:>20}{:>7}{:>7}{:>10.1f}\n", load, r.whole,
      r.requests - r.whole, r.tokens_per_s(), ms_text(r.first_token.p50, 1),
      ms_text(r.first_token.p99, 1), ms_text(r.next_token.p50, 2), ms_text(r.next_token.p99, 2),
      ms_text(r.mean_token.p50, 2),
      r.prompt_tokens > 0 ? 100 * double(r.cached_tokens) / double(r.prompt_tokens) : 0);
}

/// A line on the terminal that counts the texts of a load.
class Counter {
 public:
  explicit Counter(size_t requests) : requests_(requests) {}
  void add() {
    ++done_;
    const auto now = std::chrono::steady_clock::now();
    if (!shows_ || now - shown_ < std::chrono::milliseconds(200)) return;
    shown_ = now;
    fmt::print(stderr, "\r{} of {} texts", done_, requests_);
  }
  ~Counter() {
    if (shows_) fmt::print(stderr, "\r{:40}\r", "");
  }

 private:
  const size_t requests_;
  size_t done_ = 0;
  const bool shows_ = is_terminal(stderr);
  std::chrono::steady_clock::time_point shown_;
};

ServeResult measure(const ServeBenchArguments& arguments, const ServerUrl& url,
                    const ServeLoad& load) {
  const CompletionLoad target{.url = url,
                              .endpoint = load.is_chat ? "/v1/chat/completions" : "/v1/completions",
                              .key = env().api_key,
                              .streams = load.streams,
                              .deadline_s = arguments.deadline_s};
  const std::vector<TimedRequest> requests = make_load(load);
  Counter counter(requests.size());
  const auto begin = std::chrono::steady_clock::now();
  const auto texts = send_requests(target, requests, [&](const TimedText&) { counter.add(); });
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
  return summarize(texts, taken.count());
}

std::vector<ServeLoad> loads_of(const ServeBenchArguments& arguments) {
  std::vector<ServeLoad> loads;
  // Each load has prompts of its own, and each run: a server may have cached those of another.
  const auto add = [&] {
    loads.push_back(arguments.load);
    loads.back().seed = arguments.load.seed + loads.size() - 1;
  };
  for (const double rate : arguments.rates) {
    add();
    loads.back().rate = rate;
    loads.back().streams = kMaxAwaited;
  }
  if (!loads.empty()) return loads;
  for (const int streams : arguments.streams) {
    add();
    loads.back().streams = streams;
  }
  return loads;
}

void run(ServeBenchArguments arguments) {
  std::error_code unknown;
  const bool is_folder = std::filesystem::is_directory(arguments.server, unknown);
  if (!is_folder) parse_server_url(arguments.server);
  if (!is_folder && !arguments.serve_options.empty()) {
    throw InvalidArgument(fmt::format("options of serve with {}: expected a model's folder",
                                      printable(arguments.server)));
  }
  if (arguments.chart == "-") throw InvalidArgument("--chart -: expected a file");
  arguments.output.check();
  if (!arguments.chart.empty()) check_writable(arguments.chart);
  std::optional<ServedFolder> folder;
  if (is_folder) folder.emplace(arguments.server, arguments.serve_options);
  const ServerUrl url = parse_server_url(folder ? folder->url() : arguments.server);
  if (arguments.load.model.empty()) {
    arguments.load.model = served_model({.url = url, .key = env().api_key, .deadline_s = 30});
  }
  if (arguments.load.seed == 0) {
    arguments.load.seed = uint64_t(std::chrono::system_clock::now().time_since_epoch().count());
  }
  const bool says = arguments.output.shows_text();
  if (says) {
    const std::string ready = folder ? fmt::format(", ready in {:.1f} s", folder->ready_s()) : "";
    fmt::print("{} at {}{}\n{}", printable(arguments.load.model), arguments.server, ready, kHeader);
  }
  nlohmann::ordered_json origin;
  run_threads({.ranks = 1}, [&](Communicator& comm) { origin = origin_json(comm); });
  nlohmann::ordered_json all = nlohmann::ordered_json::array();
  std::vector<LoadPoint> points;
  std::string error;
  int64_t failed = 0, sent = 0;
  for (const ServeLoad& load : loads_of(arguments)) {
    const ServeResult result = measure(arguments, url, load);
    failed += result.requests - result.whole;
    sent += result.requests;
    all.push_back(json_of(load, result));
    if (folder) all.back()["ready_s"] = round_to(folder->ready_s(), 1000);
    all.back().update(origin);
    if (result.mean_token.p99 > 0) {
      points.push_back(
          {load.rate > 0 ? fmt::format("{}/s", load.rate) : std::to_string(load.streams),
           result.tokens_per_s(), result.mean_token.p50 * 1e3, result.mean_token.p99 * 1e3});
    }
    if (says) fmt::print("{}", row_of(load, result));
    std::fflush(stdout);
    // After each load: what is measured is kept, whatever becomes of the server.
    if (says) arguments.output.write_json(dump_json(all, 1) + "\n");
    if (!arguments.chart.empty()) write_output(arguments.chart, load_chart(points));
    if (error.empty()) error = result.error;
    if (!result.is_answered) break;
  }
  if (!says) arguments.output.write_json(dump_json(all, 1) + "\n");
  finish_output();
  if (error.empty()) return;
  throw IoError(
      fmt::format("bench serve: {} of {} texts are not whole, the first: {}", failed, sent, error));
}

}  // namespace

void add_bench_serve(CLI::App& bench) {
  auto* command =
      bench.add_subcommand("serve", "Time a server of texts, any with OpenAI's API, under load");
  auto arguments = std::make_shared<ServeBenchArguments>();
  ServeLoad& load = arguments->load;
  command
      ->add_option("SERVER", arguments->server,
                   "URL of a server, as http://127.0.0.1:8000, or folder of a model to serve")
      ->required();
  command->add_option("OPTIONS", arguments->serve_options,
                      "Options of tandem serve, after --, for a folder");
  command->add_flag("--chat", load.is_chat,
                    "Send chats: a message of short words, about as many as --prompt has tokens");
  command->add_option("--model", load.model, "Name of its model (default: the first it lists)");
  command
      ->add_option("--streams", arguments->streams, "Texts that are awaited at once, a load each")
      ->capture_default_str()
      ->delimiter(',')
      ->check(CLI::Range(1, 4096));
  command
      ->add_option("--rate", arguments->rates,
                   "Instead, send requests at random times, on average X a second (a Poisson "
                   "process), a load each")
      ->delimiter(',')
      ->check(CLI::Range(1e-3, 1e6));
  command
      ->add_option("--requests", load.requests,
                   "Requests of a load (default: 8 a stream or those of a minute, at least 32)")
      ->check(CLI::Range(1, 1 << 24));
  command->add_option("--prompt", load.prompt, "Tokens of each prompt (default: as in chats)")
      ->check(CLI::Range(1, 1 << 20));
  command->add_option("--new", load.max_tokens, "Tokens of each text (default: as in chats)")
      ->check(CLI::Range(1, 1 << 20));
  command->add_option("--vocab", load.vocab, "Prompts are of random tokens below N")
      ->capture_default_str()
      ->check(CLI::Range(1, 1 << 24));
  command->add_option("--shared-prefix", load.prefix, "First tokens that prompts have in common")
      ->capture_default_str()
      ->check(CLI::Range(0, 1 << 20));
  command->add_option("--share", load.share, "Share of the prompts that have them")
      ->capture_default_str()
      ->check(CLI::Range(0.0, 1.0));
  command->add_option("--seed", load.seed,
                      "Seed of tokens, lengths and times (default: of the clock)");
  command->add_option("--deadline", arguments->deadline_s, "Max seconds of a request")
      ->capture_default_str()
      ->check(CLI::Range(1e-3, 1e6));
  add_json_option(*command, arguments->output);
  command->add_option("--chart", arguments->chart,
                      "Write a picture to FILE: tokens/s against the time between tokens (SVG)");
  command->footer(fmt::format(
      "\nExamples:\n"
      "  tandem bench serve http://127.0.0.1:8000 --streams 1,8,32 --json serve.json\n"
      "  tandem bench serve http://127.0.0.1:8000 --rate 2,4 --shared-prefix 512 --chart load.svg\n"
      "  tandem bench serve out/own --streams 4,16 -- --tp 2 --batch 16\n"
      "\nPrompts are random tokens, texts are written greedily to their whole length. Lengths as "
      "in\n"
      "chats are log-normal: medians {} and {} tokens, sigmas {} and {}, at most {} and {}.\n"
      "First token: time from a request to the first part of its text, with --rate from the time\n"
      "at which it was due. Next token: from the part before, 0 if both came together; mean: of a\n"
      "text's tokens. Texts that fail count in no time and in no tokens/s. If TANDEM_API_KEY is "
      "set,\n"
      "requests give it as a bearer token. Exit code 3: a text is not whole; what was measured is\n"
      "kept.",
      kChatPrompts.median, kChatTexts.median, kChatPrompts.sigma, kChatTexts.sigma,
      kChatPrompts.max, kChatTexts.max));
  command->callback([arguments] {
    now_doing("bench serve " + arguments->server);
    run(*arguments);
  });
}

}  // namespace tandem::cli
