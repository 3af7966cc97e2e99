#include "engine/train/report_sections.h"

#include <fmt/format.h>
#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <functional>
#include <future>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "core/system/console.h"
#include "core/system/files.h"
#include "core/system/json.h"
#include "core/system/lines.h"
#include "core/system/process/command_line.h"
#include "core/system/process/processor_time.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/data/corpus.h"
#include "engine/data/open_data.h"
#include "engine/parallel/dims.h"
#include "engine/report/progress.h"
#include "engine/report/sent_bytes.h"
#include "engine/report/trace/step_pairs.h"
#include "engine/train/round_robin.h"
#include "engine/train/trainer.h"
#include "tandem/communicator.h"
#include "tandem/error.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr int64_t kTextBytes = 200'000;  // approximate, of held-out text

/// Standard output of a command; throws Error if it fails.
std::string output_of(const std::string& command) {
  FILE* pipe = ::popen(command.c_str(), "r");
  if (!pipe) throw_errno(command, "cannot start");
  std::string text;
  std::array<char, 65536> block;
  while (const size_t got = std::fread(block.data(), 1, block.size(), pipe)) {
    text.append(block.data(), got);
  }
  const int status = ::pclose(pipe);
  if (status == 0) return text;
  throw Error(fmt::format("{}: exit code {}", command,
                          WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status)));
}

bool is_installed(const std::string& program) {
  return !output_of("command -v " + program + " || true").empty();
}

/// Command line of this program with other arguments.
std::string tandem_command(std::vector<std::string> words) {
  words.insert(words.begin(), fs::read_symlink("/proc/self/exe").string());
  return joined(words);
}

struct HeldOutText {
  std::vector<std::string> files;
  int64_t bytes = 0;
  size_t different = 0, all = 0;  ///< held-out files of the run, without and with duplicates
};

/// Selects held-out files, without duplicates, at a stride that limits the time to seconds.
HeldOutText choose_held_out(const fs::path& dir) {
  HeldOutText text;
  std::set<std::string> seen;
  std::vector<std::pair<std::string, int64_t>> different;
  int64_t total = 0;
  for (const std::string& path : split_paths(read_file((dir / "heldout.txt").string()))) {
    ++text.all;
    try {
      const std::string content = read_file(path);
      if (content.empty() || !seen.insert(content_hash(content)).second) continue;
      different.emplace_back(path, int64_t(content.size()));
      total += int64_t(content.size());
    } catch (const IoError& error) {
      complain(fmt::format("report: left out: {}", error.what()));
    }
  }
  text.different = different.size();
  const auto every = size_t(std::max<int64_t>(1, (total + kTextBytes - 1) / kTextBytes));
  for (size_t i = 0; i < different.size(); i += every) {
    const auto& [path, bytes] = different[i];
    if (text.bytes + bytes > 2 * kTextBytes) continue;
    text.files.push_back(path);
    text.bytes += bytes;
  }
  return text;
}

/// Total bytes of the files, each compressed separately.
int64_t compressed(const std::string& command, const std::vector<std::string>& files) {
  int64_t bytes = 0;
  for (const std::string& file : files) {
    bytes += int64_t(output_of(command + " <" + joined(std::vector{file})).size());
  }
  return bytes;
}

std::optional<Json> compare_held_out(const fs::path& dir, int64_t tp) {
  if (!path_exists((dir / "heldout.txt").string())) return {};
  const HeldOutText text = choose_held_out(dir);
  if (text.files.empty()) return {};
  complain(fmt::format("Held-out text: {} files of {} different ones, {} bytes, each file alone",
                       text.files.size(), text.different, text.bytes));
  const std::string list = (dir / "compared.txt").string(), json = (dir / "eval.json").string();
  replace_file(list, join_paths(text.files));
  output_of(tandem_command({"eval", final_path(dir.string()), "--list", list, "--tp",
                            std::to_string(tp), "--json", json}));
  const auto scores = parse_json<Json>(read_file(json));
  Json compressors = Json::array();
  for (const std::string program : {"gzip", "xz"}) {
    if (!is_installed(program)) continue;
    compressors.push_back(
        {{"name", program + " -9"}, {"bytes", compressed(program + " -9 -c", text.files)}});
  }
  return Json{{"files", text.files.size()},
              {"bytes", text.bytes},
              {"model_bits_per_byte", scores.at("bits_per_byte")},
              {"compressors", std::move(compressors)}};
}

void write_sample(const fs::path& dir, int64_t tp, const std::string& prompt) {
  complain("A sample");
  replace_file(
      (dir / "sample.txt").string(),
      output_of(tandem_command({"generate", final_path(dir.string()), "--prompt", prompt, "--tp",
                                std::to_string(tp), "--temperature", "0.8", "--top-p", "0.95",
                                "--seed", "1", "--max-tokens", "600"})));
}

constexpr size_t kMaxSamples = 12;

/// Texts that checkpoints on disk write after the prompt, oldest first: at most kMaxSamples,
/// evenly.
void write_samples_over_time(const fs::path& dir, int64_t tp, const std::string& prompt) {
  const std::vector<std::string> models = list_checkpoints(dir.string());  // newest first
  const size_t count = std::min(models.size(), kMaxSamples);
  if (count < 2) return;
  complain(fmt::format("Samples of {} checkpoints", count));
  std::string lines;
  for (size_t i = count; i-- > 0;) {
    const std::string& path = models[i * (models.size() - 1) / (count - 1)];
    const std::string text = output_of(tandem_command(
        {"generate", path, "--prompt", prompt, "--tp", std::to_string(tp), "--temperature", "0.8",
         "--top-p", "0.95", "--seed", "1", "--max-tokens", "160"}));
    const int64_t step = std::stoll(path.substr(path.rfind('-') + 1));
    lines += dump_json(Json{{"step", step}, {"text", text}}) + "\n";
  }
  replace_file((dir / "samples.jsonl").string(), lines);
}

TrainConfig timed_config(TrainConfig config, int64_t steps, const std::string& strategy,
                         const std::string& link) {
  config.train.steps = steps;
  config.train.seconds = 0;
  config.train.tokens = config.train.early_stop = 0;
  config.train.max_seconds = 0;
  config.train.validate_every = 0;
  config.checkpoint.every = 0;
  config.checkpoint.every_s = 0;
  config.checkpoint.first_step = false;
  config.trace.enabled = true;
  config.trace.steps = 1;
  config.parallel.strategy = strategy;
  config.parallel.link = link;
  return config;
}

/// Trains as `request` says in `out`, with the log there.
void train_in(const fs::path& out, TrainRequest request, const TokenSource& source) {
  const std::string log_path = (out / "log.txt").string(), link = request.config.parallel.link;
  const std::unique_ptr<FILE, int (*)(FILE*)> log(std::fopen(log_path.c_str(), "w"), &std::fclose);
  if (!log) throw_errno(log_path, "cannot open");
  request.out = out.string();
  request.log = log.get();
  WorldOptions world{.ranks = ParallelDims(request.config.parallel).ranks()};
  if (!link.empty()) world.link = EmulatedLink::parse(link);
  run_threads(world, [&](Communicator& comm) { train(comm, request, source); });
}

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + ptrdiff_t(values.size() / 2);
  std::ranges::nth_element(values, middle);
  return *middle;
}

/// Load of a step; trains as `request` says in `out`.
report::StepLoad measure_load(const fs::path& out, const TrainRequest& request,
                              const TokenSource& source) {
  constexpr int64_t kWarmUp = 2;
  make_directories(out.string());
  train_in(out, request, source);
  std::vector<double> gemm, step;
  report::SentBytes sent;
  for (const std::string_view line : Lines(read_file((out / "metrics.jsonl").string()))) {
    const auto row = parse_json<Json>(line);
    if (row.at("step").get<int64_t>() <= kWarmUp) continue;
    gemm.push_back(row.value("gemm_ms", 0.0) / 1e3);
    step.push_back(row.value("step_ms", 0.0) / 1e3);
    sent.set(row);
  }
  double bytes = 0;
  for (const Json& axis : sent.json(size_t(ParallelDims(request.config.parallel).ranks()))) {
    if (axis.is_number()) bytes += axis.get<double>();
  }
  std::error_code ignored;
  fs::remove_all(out, ignored);
  return {median(gemm), median(step), bytes};
}

struct TimedSteps {
  std::string link;
  Json choice{};  ///< why this link; null if it was given
  double others_share = 0;
};

/// Times serial and overlapped trainings, alternating step by step, on the link `given` or, if
/// empty, on one chosen by the speed of GEMMs. Measures the share of the processors used by other
/// programs meanwhile.
TimedSteps time_steps(const fs::path& dir, const TrainConfig& config, const std::string& given) {
  constexpr std::array kStrategies{"serial", "overlapped"};
  const int ranks = ParallelDims(config.parallel).ranks();
  const std::unique_ptr<const TokenSource> source =
      open_data(config.data, config.model.vocab, config.train);
  TrainRequest few;  // serial, without an emulated link
  few.config = timed_config(config, 10, "serial", "");
  const report::StepLoad load = measure_load(dir / "split/load", few, *source);
  TimedSteps timed{.link = given};
  if (given.empty()) {
    const report::LinkChoice link = report::choose_link(load);
    timed.link = fmt::format("{:.0f}B/s,{:.0f}us", link.bytes_per_s, link.latency_s * 1e6);
    timed.choice =
        fmt::format("link chosen so that the {} of a step take as long as its {:.1f} ms of GEMMs",
                    format_bytes(load.sent_bytes), load.gemm_s * 1e3);
  }
  const int64_t pairs = report::choose_pairs(load);
  complain(fmt::format("Step time, {} link: {} steps, serial and overlapped in turns",
                       EmulatedLink::parse(timed.link).describe(), pairs));
  RoundRobin round_robin(int(kStrategies.size()), ranks);
  std::vector<std::future<void>> runs;
  const ProcessorTime begin = ProcessorTime::now();
  for (int run = 0; run < int(kStrategies.size()); ++run) {
    const fs::path out = dir / "split" / kStrategies[size_t(run)];
    if (run > 0) round_robin.await_ready(run - 1);  // so that it tunes undisturbed
    make_directories(out.string());
    runs.push_back(std::async(std::launch::async, [&, run, out] {
      const std::unique_ptr<RoundRobin, std::function<void(RoundRobin*)>> until_its_end(
          &round_robin, [run](RoundRobin* all) { all->leave(run); });
      TrainRequest request;
      request.config = timed_config(config, pairs, kStrategies[size_t(run)], timed.link);
      request.before_step = [&](int64_t step) { round_robin.before_step(run, step); };
      train_in(out, request, *source);
    }));
  }
  for (auto& run : runs) run.get();
  timed.others_share = external_share(begin, ProcessorTime::now());
  std::error_code ignored;
  for (const char* strategy : kStrategies) {
    for (const char* folder : {"final", "checkpoints"}) {
      fs::remove_all(dir / "split" / strategy / folder, ignored);
    }
  }
  return timed;
}

}  // namespace

void measure_report_sections(const fs::path& dir, const ReportSectionsOptions& options) {
  if (launched()) {
    throw InvalidArgument(
        "report --complete under a launcher: expected one process, which starts "
        "its ranks as threads");
  }
  const std::string config_path = (dir / "config.toml").string(),
                    facts = (dir / "run.json").string();
  const TrainConfig config =
      parse_config(read_file(config_path), "config.toml");  // paths as in the run
  Json run = path_exists(facts) ? parse_json<Json>(read_file(facts)) : Json::object();
  if (!run.is_object()) throw IoError(facts + ": expected a JSON object");
  const int64_t tp = config.parallel.tp;
  const bool has_model = path_exists((dir / "final/model.safetensors").string());
  if (has_model && !run.contains("heldout")) {
    if (auto compared = compare_held_out(dir, tp)) run["heldout"] = std::move(*compared);
  }
  if (has_model && !path_exists((dir / "sample.txt").string())) {
    write_sample(dir, tp, options.prompt);
    run["prompt"] = options.prompt;
  }
  if (has_model && !path_exists((dir / "samples.jsonl").string())) {
    write_samples_over_time(dir, tp, run.value("prompt", options.prompt));
  }
  if (ParallelDims(config.parallel).ranks() > 1 && !path_exists((dir / "split").string())) {
    const TimedSteps timed = time_steps(dir, config, options.link);
    run["others_share"] = timed.others_share;
    run["link"] = EmulatedLink::parse(timed.link).describe();
    run["link_choice"] = timed.choice;
  }
  replace_file(facts, dump_json(run, 1) + "\n");
}

}  // namespace tandem
