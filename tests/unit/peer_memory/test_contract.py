from tests.unit.storage.test_contract import (  # noqa: F401
    test_a_file_is_read_back_and_its_size_returned,
    test_a_file_of_several_parts_is_whole_although_its_chunks_are_reused,
    test_a_file_that_is_not_there_is_not_found,
    test_a_list_is_sorted_recursive_and_of_whole_folders,
    test_a_list_of_more_than_a_page_and_its_deletion_are_whole,
    test_a_name_may_hold_what_a_uri_would_not,
    test_a_replacement_that_breaks_off_keeps_the_old_file,
    test_any_range_is_read_exactly,
    test_chunks_that_break_off_leave_nothing_and_raise_their_own_error,
    test_create_never_writes_over,
    test_delete_takes_files_folders_and_what_is_gone,
    test_many_threads_read_ranges_at_once,
)
