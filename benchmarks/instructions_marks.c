/* What `instructions_job.py` asks of callgrind. Nothing happens where valgrind does not run the process. */

#include <valgrind/callgrind.h>

void start_counting(void) { CALLGRIND_START_INSTRUMENTATION; }
void stop_counting(void) { CALLGRIND_STOP_INSTRUMENTATION; }
void forget(void) { CALLGRIND_ZERO_STATS; }
void tell(const char* why) { CALLGRIND_DUMP_STATS_AT(why); }
