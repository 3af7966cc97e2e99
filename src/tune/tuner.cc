#include "tune/tuner.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "core/system/env.h"
#include "core/system/files.h"
#include "core/system/json.h"
#include "core/system/log.h"
#include "core/system/machine.h"
#include "core/system/process/data_file.h"
#include "gemm/gemm.h"
#include "tune/machine_key.h"
#include "tune/measure.h"
#include "tune/tuner_file.h"

namespace tandem {
namespace {

using Json = nlohmann::json;

using Rounds = std::vector<std::vector<double>>;  // microseconds [candidate][round]

/// Limits of an entry's validity. Times are doubtful if the load exceeds one program per core or
/// the spread exceeds the gain.
constexpr double kBusyLoad = 1, kDoubtfulForS = 3600, kOldAfterS = 30 * 86400.0;

double now_s() {
  return double(std::chrono::duration_cast<std::chrono::seconds>(
                    std::chrono::system_clock::now().time_since_epoch())
                    .count());
}

/// Entry of a key; empty if there is none.
Json entry_in(const Json& entries, const std::string& key) {
  const auto entry = entries.find(key);
  if (entry == entries.end() || !is_tuner_entry(*entry)) return Json::object();
  return *entry;
}

std::mutex memory_mutex;
std::map<std::string, Json> memory;

/// Identity of a file's content: the file is replaced as a whole when it changes.
struct FileVersion {
  std::string path;
  ino_t inode = 0;
  off_t bytes = 0;
  int64_t seconds = 0, nanoseconds = 0;

  static FileVersion of(const std::string& path) {
    struct stat status {};
    if (::stat(path.c_str(), &status) != 0) return {path};
    return {path, status.st_ino, status.st_size, status.st_mtim.tv_sec, status.st_mtim.tv_nsec};
  }
  bool operator==(const FileVersion&) const = default;
};

FileVersion read_version;
Json read_entries = Json::object();  ///< of that version

/// Entries of the tuner's file, parsed again only if it has changed. The caller holds the mutex.
const Json& file_entries() {
  FileVersion version = FileVersion::of(tuner_file_path());
  if (version != read_version) {
    read_entries = read_tuner_file(version.path);
    read_version = std::move(version);
  }
  return read_entries;
}

/// Entry of a key in memory. The caller holds the mutex. Shipped times have keys without the
/// machine's part.
const Json& known_entry(const std::string& machine, const std::string& key) {
  const auto [found, fresh] = memory.try_emplace(key);
  if (fresh) {
    Json entry = entry_in(shipped_times(), key);
    entry.merge_patch(entry_in(file_entries(), fmt::format("{} | {}", machine, key)));
    found->second = std::move(entry);
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

/// Index of the candidate that `best` is compared with: the first, or if that is the best, the
/// fastest other.
size_t rival_of(std::span<const double> us, size_t best) {
  if (best > 0) return 0;
  size_t rival = 1;
  for (size_t i = 2; i < us.size(); ++i) rival = us[i] < us[rival] ? i : rival;
  return rival;
}

/// Difference between `best` and its rival, as a fraction of the rival's time.
double lead(std::span<const double> us, size_t best) {
  const double rival = us[rival_of(us, best)];
  return rival > 0 ? std::abs(rival - us[best]) / rival : 0;
}

/// Whether times must be measured again: old ones, and doubtful ones after an hour.
bool is_stale(const Json& entry, std::span<const double> us, size_t best) {
  const double age = now_s() - entry.value("time", 0.0);
  const bool doubtful =
      entry.value("load", 0.0) > kBusyLoad || entry.value("spread", 0.0) > lead(us, best);
  return age < 0 || age > (doubtful ? kDoubtfulForS : kOldAfterS);
}

/// Rank 0's choice, on every rank; nullopt if a time is missing or all are to be measured again.
std::optional<Choice> agreed_choice(Communicator& comm, const std::string& key,
                                    std::span<const std::string> names, const Margin& margin,
                                    bool renew) {
  std::vector<double> us;
  if (comm.rank() == 0) {
    const std::lock_guard lock(memory_mutex);
    const Json& entry = known_entry(machine_key(comm), key);
    const Json times = entry.value("measured_us", Json::object());
    for (const std::string& name : names) {
      if (times.contains(name)) us.push_back(times.at(name).get<double>());
    }
    const bool known = us.size() == names.size();
    if (!known || (renew && is_stale(entry, us, fastest(us, margin)))) us.clear();
  }
  const auto blobs = comm.exchange(std::as_bytes(std::span(us)), "tuner choice");
  us.resize(blobs.at(0).size() / sizeof(double));
  if (us.empty()) return std::nullopt;
  std::memcpy(us.data(), blobs[0].data(), blobs[0].size());
  return Choice{fastest(us, margin), us};
}

/// Records measured times; rank 0 only. A doubtful lead over the first candidate is not saved in
/// the file, unless the choice must never change: the next start measures again.
void learn(const Communicator& comm, const std::string& key, std::span<const std::string> names,
           const Rounds& rounds, std::span<const double> us, size_t best, bool renew) {
  const size_t rival = rival_of(us, best);
  const double spread = std::max(relative_spread(rounds[best]), relative_spread(rounds[rival]));
  const std::lock_guard lock(memory_mutex);
  const std::string machine = machine_key(comm);
  Json entry = known_entry(machine, key);
  for (size_t i = 0; i < us.size(); ++i) entry["measured_us"][names[i]] = us[i];
  entry["spread"] = std::round(spread * 1e4) / 1e4;
  entry["load"] = std::round(load_per_core() * 100) / 100;
  entry["time"] = now_s();
  memory[key] = entry;
  const bool stored = !renew || best == 0 || spread <= lead(us, best);
  if (stored)
    keep_in_tuner_file(tuner_file_path(), {{fmt::format("{} | {}", machine, key), entry}});
  log_message(LogLevel::debug,
              fmt::format("tuner: {}: {} ({:.0f} us, {} {:.0f} us, spread {:.0f} %){}", key,
                          names[best], us[best], names[rival], us[rival], spread * 100,
                          stored ? "" : ": in doubt, not kept"));
}

/// Chooses by known or measured times. `renew`: old or doubtful times are measured again.
Choice choose_by_rounds(Communicator& comm, const std::string& key,
                        std::span<const std::string> names,
                        const std::function<Rounds()>& measure_us, const Margin& margin,
                        bool renew) {
  comm.require_same("tuner candidates", fmt::format("{}{}", fmt::join(names, "\n"),
                                                    env().tune ? "" : "\nTANDEM_TUNE=0"));
  if (names.size() == 1) return {};
  renew = renew && env().tune;
  if (auto known = agreed_choice(comm, key, names, margin, renew)) return *known;
  if (!env().tune) return {};
  const Rounds rounds = measure_us();
  std::vector<double> us;
  for (const auto& of_one : rounds) us.push_back(median(of_one));
  const size_t best = fastest(us, margin);
  if (comm.rank() == 0) learn(comm, key, names, rounds, us, best, renew);
  return {best, us};
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
  read_version = {};
}

Choice choose(Communicator& comm, const std::string& key, std::span<const std::string> names,
              const std::function<std::vector<double>()>& measure_us, Margin margin) {
  const auto rounds = [&] {
    Rounds one;
    for (const double us : measure_us()) one.push_back({us});
    return one;
  };
  return choose_by_rounds(comm, key, names, rounds, margin, /*renew=*/false);
}

Choice tune(Communicator& comm, std::string_view op, std::string_view shape,
            std::span<const std::string> names, const std::function<double(size_t)>& seconds,
            Bits bits) {
  const std::string key = fmt::format("{} | {} x{} | threads {} | {} {}", comm.transport(),
                                      comm.link(), comm.size(), kernel_threads(), op, shape);
  const auto rounds = [&] {
    std::vector<TimedRun> variants;
    for (size_t i = 0; i < names.size(); ++i) {
      variants.emplace_back([&seconds, i] { return seconds(i); });
    }
    // Enough rounds to average out noise for a short call, few for a long one.
    const MeasureOptions limits{.seed = 1, .min_rounds = 3, .max_rounds = 9, .seconds = 0.5};
    Rounds all = measure(comm, std::span<const TimedRun>(variants), limits);
    for (auto& of_one : all) {
      for (double& each : of_one) each *= 1e6;
    }
    return all;
  };
  const bool renew = bits == Bits::same && rows_keep_bits();
  return choose_by_rounds(comm, key, names, rounds, kOverSerial, renew);
}

}  // namespace tandem
