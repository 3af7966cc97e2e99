#include "engine/serve/serve_loop.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <nlohmann/json.hpp>
#include <span>
#include <utility>

namespace tandem {
namespace {

/// Max time between exchanges without requests, also as a share of the deadline: the other ranks
/// wait for rank 0 in one.
constexpr double kIdleS = 2, kIdleShare = 0.25;
/// Deadline of such an exchange among threads of one process, which may be stopped for a while:
/// none of them hangs without the others.
constexpr double kThreadsIdleS = 1e9;
/// Min time between lists of receipts while requests are unfinished.
constexpr std::chrono::milliseconds kReceiptsTime{250};

/// Token ids as bytes.
nlohmann::json pack(const std::vector<int32_t>& tokens) {
  const auto* const begin = reinterpret_cast<const uint8_t*>(tokens.data());
  return nlohmann::json::binary({begin, begin + tokens.size() * sizeof(int32_t)});
}

void unpack(const nlohmann::json& json, std::vector<int32_t>& tokens) {
  const std::vector<uint8_t>& bytes = json.get_binary();
  tokens.resize(bytes.size() / sizeof(int32_t));
  if (!bytes.empty()) std::memcpy(tokens.data(), bytes.data(), bytes.size());
}

nlohmann::json pack(const std::vector<TokenBias>& biases) {
  nlohmann::json list = nlohmann::json::array();
  for (const TokenBias& each : biases) {
    list.push_back(nlohmann::json::array({each.token, each.bias}));
  }
  return list;
}

void unpack(const nlohmann::json& json, std::vector<TokenBias>& biases) {
  for (const nlohmann::json& each : json) biases.push_back({each[0], each[1]});
}

template <typename T>
nlohmann::json pack(const T& value) {
  return value;
}

template <typename T>
void unpack(const nlohmann::json& json, T& value) {
  value = json.get<T>();
}

}  // namespace

std::vector<int64_t> ServeLoop::submit(std::vector<Request> requests) {
  std::vector<int64_t> numbers;
  {
    const std::lock_guard lock(mutex_);
    const auto count = int64_t(requests.size());
    if (commands_.ends || stats_.unfinished + count > max_unfinished_) return numbers;
    stats_.unfinished += count;
    for (Request& request : requests) {
      numbers.push_back(next_++);
      commands_.list.push_back({numbers.back(), false, std::move(request)});
    }
  }
  changed_.notify_one();
  return numbers;
}

void ServeLoop::cancel(int64_t request) {
  const std::lock_guard lock(mutex_);
  commands_.list.push_back({request, true});
  changed_.notify_one();
}

void ServeLoop::end() {
  const std::lock_guard lock(mutex_);
  commands_.ends = true;
  changed_.notify_one();
}

ServeLoop::Stats ServeLoop::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

bool ServeLoop::is_ending() const {
  const std::lock_guard lock(mutex_);
  return commands_.ends;
}

ServeLoop::Commands ServeLoop::take(bool is_idle, double max_s) {
  std::unique_lock lock(mutex_);
  if (is_idle) {
    changed_.wait_for(lock, std::chrono::duration<double>(max_s),
                      [&] { return commands_.ends || !commands_.list.empty(); });
  }
  return {std::exchange(commands_.list, {}), commands_.ends};
}

std::vector<std::byte> ServeLoop::encode(const Commands& commands) {
  if (commands.list.empty() && !commands.ends) return {};
  nlohmann::json list = nlohmann::json::array();
  for (const Command& command : commands.list) {
    if (command.cancels) {
      list.push_back({command.request});
      continue;
    }
    nlohmann::json fields = nlohmann::json::array();
    visit(command.content,
          [&](const char*, const auto& value, SetBy) { fields.push_back(pack(value)); });
    list.push_back({command.request, std::move(fields)});
  }
  const std::vector<uint8_t> bytes = nlohmann::json::to_cbor({list, commands.ends});
  const auto blob = std::as_bytes(std::span(bytes));
  return {blob.begin(), blob.end()};
}

ServeLoop::Commands ServeLoop::decode(std::span<const std::byte> blob) {
  Commands commands;
  if (blob.empty()) return commands;
  const auto* begin = reinterpret_cast<const uint8_t*>(blob.data());
  const nlohmann::json root = nlohmann::json::from_cbor(begin, begin + blob.size());
  for (const nlohmann::json& each : root[0]) {
    Command command{each[0], each.size() == 1};
    if (!command.cancels) {
      auto field = each[1].begin();
      visit(command.content, [&](const char*, auto& value, SetBy) { unpack(*field++, value); });
    }
    commands.list.push_back(std::move(command));
  }
  commands.ends = root[1];
  return commands;
}

ServeLoop::Commands ServeLoop::exchange(Communicator& tp, Commands commands, bool is_idle) {
  const bool is_first = tp.rank() == 0;
  const double deadline = tp.deadline();
  if (is_idle && !launched()) tp.set_deadline(kThreadsIdleS);
  const auto blobs =
      tp.exchange(is_first ? encode(commands) : std::vector<std::byte>(), "requests");
  tp.set_deadline(deadline);
  return is_first ? std::move(commands) : decode(blobs[0]);
}

void ServeLoop::count(const Engine& engine, int64_t num_cancelled,
                      std::span<const TokenEvent> events) {
  const auto now = std::chrono::steady_clock::now();
  // A list of all operators of all layers: too long for each step.
  const bool lists_receipts = engine.is_idle() || now - receipts_listed_ >= kReceiptsTime;
  if (lists_receipts) receipts_listed_ = now;
  std::vector<Receipt> listed = lists_receipts ? receipts() : std::vector<Receipt>();
  const std::lock_guard lock(mutex_);
  stats_.unfinished -= num_cancelled;
  for (const TokenEvent& event : events) stats_.unfinished -= event.finish ? 1 : 0;
  stats_.pages = engine.num_pages();
  stats_.pages_used = stats_.pages - engine.free_pages();
  stats_.steps = engine.stats().steps;
  stats_.rows = engine.stats().rows;
  stats_.preempted = engine.stats().preempted;
  stats_.shared_tokens = engine.stats().shared_tokens;
  if (lists_receipts) stats_.receipts.swap(listed);
}

void ServeLoop::run(Communicator& tp, Engine& engine, const Listener& listener) {
  const bool is_first = tp.rank() == 0;
  while (true) {
    Commands commands;
    if (is_first) commands = take(engine.is_idle(), std::min(kIdleS, kIdleShare * tp.deadline()));
    if (tp.size() > 1) commands = exchange(tp, std::move(commands), engine.is_idle());
    int64_t num_cancelled = 0;
    for (Command& command : commands.list) {
      if (command.cancels) {
        num_cancelled += engine.cancel(command.request);
      } else {
        engine.submit(std::move(command.content));
      }
    }
    if (commands.ends && engine.is_idle()) return;
    std::vector<TokenEvent> events = engine.step();
    if (!is_first) continue;
    count(engine, num_cancelled, events);
    if (!events.empty()) listener(std::move(events));
  }
}

}  // namespace tandem
