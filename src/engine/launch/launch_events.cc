#include "engine/launch/launch_events.h"

#include <fcntl.h>

#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>

#include "core/system/console.h"
#include "core/system/files.h"
#include "core/system/json.h"
#include "tandem/error.h"

namespace tandem {
namespace {

nlohmann::ordered_json rounded(const std::optional<double>& milliseconds) {
  if (!milliseconds) return nullptr;
  return std::round(*milliseconds * 1e3) / 1e3;
}

}  // namespace

EventLog::EventLog(const std::string& out) : path_(out + "/events.jsonl") {
  if (out.empty()) return;
  make_directories(out);
  file_.emplace(path_, O_WRONLY | O_CREAT | O_APPEND | O_NOFOLLOW);
}

void EventLog::add(const LaunchEvent& event) {
  if (!file_) return;
  const std::chrono::duration<double> now = std::chrono::system_clock::now().time_since_epoch();
  nlohmann::ordered_json line{{"event", event.event},
                              {"rank", event.rank},
                              {"step", event.step},
                              {"cause", event.cause},
                              {"noticed_ms", rounded(event.noticed_ms)},
                              {"recovered_ms", rounded(event.recovered_ms)},
                              {"process", event.process},
                              {"host", event.host},
                              {"replacement", nullptr},
                              {"replacement_host", nullptr},
                              {"continues_after", nullptr},
                              {"steps_lost", nullptr},
                              {"time_s", now.count()}};
  if (event.replacement) {
    line["replacement"] = *event.replacement;
    line["replacement_host"] = event.replacement_host;
  }
  if (event.steps_lost) {
    line["continues_after"] = *event.continues_after;
    line["steps_lost"] = *event.steps_lost;
  }
  write(dump_json(line) + "\n");
}

void EventLog::add(const report::SlowRank& slow) {
  if (!file_) return;
  const std::chrono::duration<double> now = std::chrono::system_clock::now().time_since_epoch();
  const report::Straggler& straggler = slow.straggler;
  const nlohmann::ordered_json line{{"event", "slow"},
                                    {"rank", straggler.rank},
                                    {"step", straggler.to_step},
                                    {"cause", report::describe(straggler, slow.position)},
                                    {"phase", name_of(straggler.phase)},
                                    {"excess", straggler.excess},
                                    {"share", straggler.share_of_step},
                                    {"host", slow.position.host},
                                    {"time_s", now.count()}};
  write(dump_json(line) + "\n");
}

void EventLog::write(std::string line) {
  try {
    append_to(file_->get(), path_, line);
  } catch (const IoError& error) {
    complain(std::string("tandem: launch: warning: ") + error.what());
    file_.reset();
  }
}

}  // namespace tandem
