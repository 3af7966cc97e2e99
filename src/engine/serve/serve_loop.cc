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

/// Token ids as bytes.
nlohmann::json encode_tokens(std::span<const int32_t> tokens) {
  const auto* const begin = reinterpret_cast<const uint8_t*>(tokens.data());
  return nlohmann::json::binary({begin, begin + tokens.size_bytes()});
}

std::vector<int32_t> decode_tokens(const nlohmann::json& json) {
  const std::vector<uint8_t>& bytes = json.get_binary();
  std::vector<int32_t> tokens(bytes.size() / sizeof(int32_t));
  std::memcpy(tokens.data(), bytes.data(), bytes.size());
  return tokens;
}

nlohmann::json encode_text(const Request& r) {
  return nlohmann::json::array(
      {r.eos_token_ids, r.stop_token_ids, r.stops, r.has_text_before, r.hides_special, r.shown});
}

void decode_text(const nlohmann::json& json, Request& r) {
  r.eos_token_ids = json[0].get<std::vector<int32_t>>();
  r.stop_token_ids = json[1].get<std::vector<int32_t>>();
  r.stops = json[2].get<std::vector<std::string>>();
  r.has_text_before = json[3];
  r.hides_special = json[4];
  r.shown = json[5].get<std::vector<int32_t>>();
}

nlohmann::json encode_rules(const LogitsProcessors& rules) {
  nlohmann::json biases = nlohmann::json::array();
  for (const TokenBias& each : rules.biases) {
    biases.push_back(nlohmann::json::array({each.token, each.bias}));
  }
  return {rules.repetition_penalty, rules.presence_penalty, rules.frequency_penalty, biases,
          rules.min_p};
}

LogitsProcessors decode_rules(const nlohmann::json& json) {
  LogitsProcessors rules{json[0], json[1], json[2], {}, json[4]};
  for (const nlohmann::json& each : json[3]) rules.biases.push_back({each[0], each[1]});
  return rules;
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
    const Request& r = command.content;
    list.push_back({command.request, encode_tokens(r.prompt), r.max_tokens, r.sampling.temperature,
                    r.sampling.top_k, r.sampling.top_p, r.sampling.seed, encode_text(r),
                    encode_rules(r.rules), r.alternatives, r.prompt_alternatives});
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
      Request& r = command.content;
      r.prompt = decode_tokens(each[1]);
      r.max_tokens = each[2];
      r.sampling = {each[3], each[4], each[5], each[6]};
      decode_text(each[7], r);
      r.rules = decode_rules(each[8]);
      r.alternatives = each[9];
      r.prompt_alternatives = each[10];
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
    {
      const std::lock_guard lock(mutex_);
      stats_.unfinished -= num_cancelled;
      for (const TokenEvent& event : events) stats_.unfinished -= event.finish ? 1 : 0;
      stats_.pages = engine.num_pages();
      stats_.pages_used = stats_.pages - engine.free_pages();
      stats_.steps = engine.stats().steps;
      stats_.rows = engine.stats().rows;
      stats_.preempted = engine.stats().preempted;
      stats_.shared_tokens = engine.stats().shared_tokens;
      stats_.receipts = receipts();
    }
    if (!events.empty()) listener(std::move(events));
  }
}

}  // namespace tandem
