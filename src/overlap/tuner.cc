#include "overlap/tuner.h"

#include <fmt/format.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "core/env.h"
#include "core/machine.h"
#include "kernels/gemm.h"
#include "overlap/measure.h"

namespace tandem {
namespace {

using Json = nlohmann::json;

std::string cache_path() {
  return env().cache_dir + "/tuner.json";
}

/// The whole file as an object; empty when there is none or it is damaged.
Json read_cache() {
  std::ifstream file(cache_path());
  if (!file) return Json::object();
  Json json = Json::parse(file, nullptr, false);
  if (!json.is_object()) {
    spdlog::warn("tuner cache {}: not a JSON object, ignored", cache_path());
    return Json::object();
  }
  return json;
}

std::optional<Plan> plan_from(const Json& cache, const std::string& key) {
  const auto entry = cache.find(key);
  if (entry == cache.end()) return std::nullopt;
  try {
    const Plan plan{entry->at("overlapped").get<bool>(), entry->at("chunks").get<int>(),
                    entry->at("one_shot").get<bool>()};
    if (plan.chunks >= 1 && plan.chunks <= kMaxChunks) return plan;
  } catch (const Json::exception&) {
  }
  spdlog::warn("tuner cache {}: entry '{}' is damaged, ignored", cache_path(), key);
  return std::nullopt;
}

/// Rename makes it atomic: a reader sees the old file or the new one. A cache that cannot be
/// written costs a measurement next time, nothing else.
void write_cache(const std::string& key, const Plan& plan, std::span<const double> seconds) {
  Json cache = read_cache();
  Json& entry = cache[key];
  entry = {{"overlapped", plan.overlapped}, {"chunks", plan.chunks}, {"one_shot", plan.one_shot}};
  for (const double s : seconds) entry["measured_us"].push_back(s * 1e6);
  std::error_code ignored;
  std::filesystem::create_directories(env().cache_dir, ignored);
  const std::string temporary = fmt::format("{}.{}", cache_path(), getpid());
  std::ofstream file(temporary);
  file << cache.dump(1) << '\n';
  file.close();
  if (file) std::filesystem::rename(temporary, cache_path(), ignored);
  if (!file || ignored) spdlog::debug("tuner cache {}: cannot be written", cache_path());
}

std::mutex memory_mutex;
std::map<std::string, Plan> memory;

std::optional<Plan> known(const std::string& key) {
  const std::lock_guard lock(memory_mutex);
  if (const auto found = memory.find(key); found != memory.end()) return found->second;
  const auto plan = plan_from(read_cache(), key);
  if (plan) memory[key] = *plan;
  return plan;
}

void remember(const std::string& key, const Plan& plan, std::span<const double> seconds) {
  const std::lock_guard lock(memory_mutex);
  memory[key] = plan;
  write_cache(key, plan, seconds);
}

/// Rank 0's knowledge, on every rank: the index of the plan among `plans`, or -1.
int agreed_choice(Communicator& comm, const std::string& key, std::span<const Plan> plans) {
  int choice = -1;
  if (comm.rank() == 0) {
    if (const auto plan = known(key)) {
      const auto at = std::find(plans.begin(), plans.end(), *plan);
      if (at != plans.end()) choice = int(at - plans.begin());
    }
  }
  const auto blobs = comm.exchange(std::as_bytes(std::span(&choice, 1)), "tuner choice");
  std::memcpy(&choice, blobs.at(0).data(), sizeof choice);
  return choice;
}

}  // namespace

void forget_tuned() {
  const std::lock_guard lock(memory_mutex);
  memory.clear();
}

Plan tune(Communicator& comm, std::string_view op, std::string_view shape,
          std::span<const Plan> plans, const std::function<void(const Plan&)>& run) {
  if (plans.size() == 1) return plans[0];
  const std::string key =
      fmt::format("{} | {} | {} x{} | threads {} | {} {}", this_machine().cpu, comm.transport(),
                  comm.link(), comm.size(), kernel_threads(), op, shape);
  int choice = agreed_choice(comm, key, plans);
  if (choice >= 0) return plans[size_t(choice)];

  std::vector<std::function<void()>> variants;
  for (const Plan& plan : plans) variants.emplace_back([&run, plan] { run(plan); });
  // Enough rounds to see through noise where a call is short, few where it is long.
  const MeasureOptions limits{.seed = 1, .least_rounds = 3, .most_rounds = 9, .seconds = 0.5};
  const auto samples = measure(comm, variants, limits);
  std::vector<double> seconds;
  for (const auto& of_plan : samples) seconds.push_back(median(of_plan));
  choice = 0;
  for (size_t i = 1; i < plans.size(); ++i) {
    // Within 2 % of serial is a tie.
    const double bar = choice == 0 ? seconds[0] * 0.98 : seconds[size_t(choice)];
    if (seconds[i] < bar) choice = int(i);
  }
  const Plan& best = plans[size_t(choice)];
  if (comm.rank() == 0) {
    remember(key, best, seconds);
    spdlog::debug("tuner: {}: {} ({:.0f} us, serial {:.0f} us)", key, describe(best),
                  seconds[size_t(choice)] * 1e6, seconds[0] * 1e6);
  }
  return best;
}

}  // namespace tandem
