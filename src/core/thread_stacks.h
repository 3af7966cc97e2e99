// Stacks of this process's other threads, for errors that say why a rank is late.
#pragma once

#include <sys/types.h>
#include <string>

namespace tandem {

/// This thread's number in the process table.
pid_t this_thread_id();

/// Functions that thread `id` of this process is in, innermost first: "read < copy < main".
/// Functions without a name: their file and where they are in it. Empty where the thread is gone or
/// does not answer within 0.2 s. Uses SIGURG, unless the program handles that itself.
std::string stack_of_thread(pid_t id);

}  // namespace tandem
