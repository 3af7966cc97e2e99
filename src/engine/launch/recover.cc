#include "engine/launch/recover.h"

#include <chrono>
#include <exception>

#include "comm/world/gpus.h"
#include "comm/world/new_worlds.h"
#include "tandem/communicator.h"
#include "tandem/error.h"

namespace tandem {
namespace {

/// Time for the launcher to begin a generation after an abort, which a loss explains, and after
/// another error, which it may have caused.
constexpr auto kAbortPatience = std::chrono::seconds(10);
constexpr auto kErrorPatience = std::chrono::milliseconds(500);

void check_generation() {
  if (control::Member::of_environment()->is_outdated()) {
    throw Aborted(-1, "the launcher has ended this world: a rank was lost");
  }
}

/// Ends waits of a world that the launcher has given up.
class GenerationCheck {
 public:
  GenerationCheck() { set_wait_check(check_generation); }
  ~GenerationCheck() { set_wait_check(nullptr); }
  GenerationCheck(const GenerationCheck&) = delete;
  GenerationCheck& operator=(const GenerationCheck&) = delete;
};

}  // namespace

bool run_recovering(control::Member& member, const std::function<void()>& attempt) {
  using Joined = control::Member::Joined;
  while (true) {
    std::exception_ptr error;
    std::chrono::milliseconds patience = kErrorPatience;
    try {
      const GenerationCheck check;
      attempt();
      member.note_done();
      return true;
    } catch (const Aborted&) {
      error = std::current_exception();
      patience = kAbortPatience;
    } catch (const DeviceError&) {
      error = std::current_exception();
      if (has_lost_gpu()) member.leave(control::ProcessFault::lost_gpu);
    } catch (const Error&) {
      error = std::current_exception();
    }
    leave_processes();
    const Joined joined = member.join(control::Member::Clock::now() + patience);
    if (joined == Joined::yes) continue;
    if (joined == Joined::ended && !member.has_rank()) return false;
    if (member.is_complete()) {
      member.note_done();
      return true;
    }
    std::rethrow_exception(error);
  }
}

}  // namespace tandem
