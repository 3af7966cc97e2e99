// A program's operator new that fails when asked to.
#pragma once

namespace tandem::test {

/// Makes this thread's next allocation throw bad_alloc.
void fail_next_allocation();
/// Whether it is still to come.
bool allocation_will_fail();

}  // namespace tandem::test
