#include "tune/tuner.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <vector>

#include "core/data_file.h"
#include "core/env.h"
#include "core/files.h"
#include "core/json.h"
#include "core/log.h"
#include "core/machine.h"
#include "gemm/gemm.h"
#include "tune/measure.h"
#include "tune/tuner_file.h"

namespace tandem {
namespace {

using Json = nlohmann::json;

/// {"candidate": us} of one entry; empty when there is none.
Json times_in(const Json& entries, const std::string& key) {
  const auto entry = entries.find(key);
  if (entry == entries.end() || !is_tuner_entry(*entry)) return Json::object();
  return entry->value("measured_us", Json::object());
}

/// A file that cannot be written costs a measurement next time, nothing else; said once.
void keep_times(const std::string& key, const Json& times) {
  try {
    merge_into_tuner_file(tuner_file_path(), {{key, {{"measured_us", times}}}});
  } catch (const IoError& error) {
    static std::once_flag once;
    std::call_once(once, [&] {
      log_message(LogLevel::warn,
                  fmt::format("tuner cache: {}: what is measured now will be measured again "
                              "(TANDEM_CACHE_DIR)",
                              error.what()));
    });
  }
}

std::mutex memory_mutex;
std::map<std::string, Json> memory;

/// Caller holds the mutex.
const Json& known_times(const std::string& key) {
  const auto [found, fresh] = memory.try_emplace(key);
  if (fresh) {
    found->second = times_in(shipped_times(), key);
    found->second.update(times_in(read_tuner_file(tuner_file_path()), key));
  }
  return found->second;
}

size_t fastest(std::span<const double> us, const Margin& margin) {
  size_t best = 0;
  for (size_t i = 1; i < us.size(); ++i) {
    const double gain = best == 0 ? margin.over_first : margin.over_others;
    if (us[i] < us[best] * (1 - gain)) best = i;
  }
  return best;
}

/// Rank 0's knowledge, on every rank: the index among `names`, or -1 when some time is missing.
int agreed_choice(Communicator& comm, const std::string& key, std::span<const std::string> names,
                  const Margin& margin) {
  int choice = -1;
  if (comm.rank() == 0) {
    const std::lock_guard lock(memory_mutex);
    const Json& times = known_times(key);
    std::vector<double> us;
    for (const std::string& name : names) {
      if (times.contains(name)) us.push_back(times.at(name).get<double>());
    }
    if (us.size() == names.size()) choice = int(fastest(us, margin));
  }
  const auto blobs = comm.exchange(std::as_bytes(std::span(&choice, 1)), "tuner choice");
  std::memcpy(&choice, blobs.at(0).data(), sizeof choice);
  return choice;
}

}  // namespace

const Json& shipped_times() {
  static const Json times = [] {
    const std::string path = data_file("shipped_tuner.json");
    if (path.empty()) {
      log_message(LogLevel::debug, "tuner: shipped_tuner.json is not installed: all is measured");
      return Json::object();
    }
    Json file = parse_json(read_file(path));
    if (file.is_object()) return file;
    log_message(LogLevel::warn, fmt::format("tuner: {}: damaged: all is measured", path));
    return Json::object();
  }();
  return times;
}

void forget_tuned() {
  const std::lock_guard lock(memory_mutex);
  memory.clear();
}

size_t choose(Communicator& comm, const std::string& key, std::span<const std::string> names,
              const std::function<std::vector<double>()>& measure_us, Margin margin) {
  comm.require_same("tuner candidates", fmt::format("{}{}", fmt::join(names, "\n"),
                                                    env().tune ? "" : "\nTANDEM_TUNE=0"));
  if (names.size() == 1) return 0;
  if (const int known = agreed_choice(comm, key, names, margin); known >= 0) return size_t(known);
  if (!env().tune) return 0;
  const std::vector<double> us = measure_us();
  const size_t best = fastest(us, margin);
  if (comm.rank() == 0) {
    const std::lock_guard lock(memory_mutex);
    Json times = known_times(key);
    for (size_t i = 0; i < us.size(); ++i) times[names[i]] = us[i];
    memory[key] = times;
    keep_times(key, times);
    log_message(LogLevel::debug, fmt::format("tuner: {}: {} ({:.0f} us, {} {:.0f} us)", key,
                                             names[best], us[best], names[0], us[0]));
  }
  return best;
}

size_t tune(Communicator& comm, std::string_view op, std::string_view shape,
            std::span<const std::string> names, const std::function<double(size_t)>& seconds) {
  const std::string key =
      fmt::format("{} | {} | {} x{} | threads {} | {} {}", this_machine().cpu, comm.transport(),
                  comm.link(), comm.size(), kernel_threads(), op, shape);
  return choose(comm, key, names, [&] {
    std::vector<TimedVariant> variants;
    for (size_t i = 0; i < names.size(); ++i) {
      variants.emplace_back([&seconds, i] { return seconds(i); });
    }
    // Enough rounds to see through noise where a call is short, few where it is long.
    const MeasureOptions limits{.seed = 1, .least_rounds = 3, .most_rounds = 9, .seconds = 0.5};
    std::vector<double> us;
    for (const auto& of_one : measure(comm, std::span<const TimedVariant>(variants), limits)) {
      us.push_back(median(of_one) * 1e6);
    }
    return us;
  });
}

}  // namespace tandem
